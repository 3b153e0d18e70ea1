"""The columns that a ranker sees: r requests with n pairs in all, and the vectors that the cache had for them.

In: numpy columns that `streams.features` builds from histories and counters. Out: nothing; these are the nouns between the
streams and the models. Ids reach a model only as hash buckets, so a model needs no vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

DENSE = (
    "item_impressions_log",  # log1p of the item's impressions in 24 h
    "item_positives_log",
    "item_rate",  # logit of the smoothed positive rate in 24 h
    "user_impressions_log",
    "user_positives_log",
    "user_rate",
    "pair_touched_log",  # log1p of this item's rows in the user's history
    "pair_touched_age",  # log1p hours since the last of them, AGE_NEVER where there is none
    "pair_shown_log",  # the same two over the user's recent impressions
    "pair_shown_age",
    "category_share",  # share of the history in this category
    "category_age",  # log1p hours since the last row in this category
    "profile_content",  # cosine of the item's content and the history's decayed mean content
    "history_log",  # log1p of the history's length
    "idle",  # log1p hours since the user's last row
    "hour_sin",
    "hour_cos",
)
"""Names of the dense features, in column order."""

AGE_NEVER = float(np.log1p(24.0 * 30))
SHORT_HISTORY = 16
"""Rows of the short history that the ranker sees, newest first."""


@dataclass(frozen=True, slots=True)
class Features:
    """r requests, n pairs; pair i belongs to request `request[i]`, the pairs of a request are contiguous.

    `request` int32 [n], `item_bucket` int32 [n], `category` int32 [n], `content` float32 [n, c], `dense` float32 [n, len(DENSE)],
    `user_bucket` int32 [r], `history_bucket` and `history_category` int32 [r, SHORT_HISTORY] (-1 = empty),
    `history_type` uint8 likewise, `history_age` float32 likewise (log1p hours).
    """

    request: I32
    item_bucket: I32
    category: I32
    content: F32
    dense: F32
    user_bucket: I32
    history_bucket: I32
    history_category: I32
    history_type: U8
    history_age: F32


@dataclass(frozen=True, slots=True)
class Vectors:
    """What the cache had: d numbers each in one embedding space, ages in ms of event time, -1 = missing.

    `exact` float32 [n, d] with `exact_age_ms` int64 [n]; `user` (24 h mean) and `neighbor` float32 [r, d] with ages int64 [r].
    """

    exact: F32
    exact_age_ms: I64
    user: F32
    user_age_ms: I64
    neighbor: F32
    neighbor_age_ms: I64


def no_vectors(n: int, r: int, d: int) -> Vectors:
    """Vectors of which every one is missing: the plain ranker's view."""
    missing_n, missing_r = np.full(n, -1, np.int64), np.full(r, -1, np.int64)
    empty_r = np.zeros((r, d), np.float32)
    return Vectors(np.zeros((n, d), np.float32), missing_n, empty_r, missing_r, empty_r, missing_r)


def pair_starts(features: Features) -> I64:
    """int64 [r + 1]: request q's pairs are the rows `starts[q]` up to `starts[q + 1]`."""
    return np.searchsorted(features.request, np.arange(len(features.user_bucket) + 1)).astype(np.int64)


def take_requests(
    features: Features, vectors: Vectors, chosen: I64, starts: I64 | None = None
) -> tuple[Features, Vectors, I64]:
    """The features and vectors of some requests in the order given, and the rows of their pairs in the input (int64).

    `starts`: what `pair_starts` gave, for callers that take often.
    """
    starts = pair_starts(features) if starts is None else starts
    counts = starts[chosen + 1] - starts[chosen]
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    request = np.repeat(np.arange(len(chosen), dtype=np.int32), counts)
    pairs = np.arange(total) + np.repeat(starts[chosen] - (ends - counts), counts)
    taken = Features(
        request,
        *(column[pairs] for column in (features.item_bucket, features.category, features.content, features.dense)),
        *(
            column[chosen]
            for column in (
                features.user_bucket,
                features.history_bucket,
                features.history_category,
                features.history_type,
                features.history_age,
            )
        ),
    )
    had = Vectors(
        vectors.exact[pairs], vectors.exact_age_ms[pairs],
        vectors.user[chosen], vectors.user_age_ms[chosen],
        vectors.neighbor[chosen], vectors.neighbor_age_ms[chosen],
    )  # fmt: skip
    return taken, had, pairs

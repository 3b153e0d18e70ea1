"""Features: what a ranker sees of r requests with n pairs, built from histories, counters and the item index.

In: per request the user, its two histories and `now`; per pair the item's row and its counters. Out: `models.features.Features`.
Never reads a store, a clock or a vector. A pair's numbers depend on its own request alone, so that a request gets the same bytes
alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from models.features import DENSE, I32, I64, SHORT_HISTORY, U8, Features
from schemas.keys import hash64
from streams.columns import REQUEST_COLUMNS, pair_columns, request_columns, short_histories
from streams.history import HistoryRow
from streams.items import CATEGORY_UNKNOWN, ItemIndex

USER_BUCKET_MASK = 0x7FFF_FFFF
"""A user's bucket is its hash's low 31 bits; a ranker takes it modulo its own table."""


@dataclass(frozen=True, slots=True)
class _Past:
    """Histories of r requests end to end: request r's rows are [starts[r], ends[r]), newest last."""

    rows: I32
    ts: I64
    types: U8
    starts: I64
    ends: I64


def build_features(
    users: Sequence[str],
    histories: Sequence[HistoryRow],
    shown: Sequence[HistoryRow],
    now: I64,
    request: I32,
    item_rows: I32,
    items: ItemIndex,
    item_counts: I64,
    user_counts: I64,
) -> Features:
    """Features of n pairs of r requests; the semantics of every dense column stand in `models.features.DENSE`.

    `users`, `histories`, `shown` have r entries, `now` int64 [r] is event time in UTC ms, `request` int32 [n] says which request a
    pair belongs to, `item_rows` int32 [n] are rows of `items`; `item_counts` int64 [n, 2] and `user_counts` int64 [r, 2] are
    impressions and positives in the last 24 h.
    """
    r, n = len(users), len(item_rows)
    past, seen = _join(histories, shown, items)
    of_request, profile = np.empty((r, REQUEST_COLUMNS)), np.empty((r, items.content.shape[1] + 1))
    request_columns(past.rows, past.ts, past.starts, past.ends, now, items.content, user_counts, of_request, profile)
    dense = np.empty((n, len(DENSE)), np.float32)
    pair_columns(
        request, item_rows, now, past.rows, past.ts, past.starts, past.ends, seen.rows, seen.ts, seen.starts, seen.ends,
        items.category, items.content, CATEGORY_UNKNOWN, item_counts, of_request, profile, dense,
    )  # fmt: skip
    shape = (r, SHORT_HISTORY)
    short = (
        np.empty(shape, np.int32),
        np.empty(shape, np.int32),
        np.empty(shape, np.uint8),
        np.empty(shape, np.float32),
    )
    short_histories(past.rows, past.ts, past.types, past.starts, past.ends, now, items.bucket, items.category, *short)
    user_bucket = np.array([hash64(user) & USER_BUCKET_MASK for user in users], np.int32)
    category, content = items.category[item_rows], items.content[item_rows]
    return Features(request, items.bucket[item_rows], category, content, dense, user_bucket, *short)


def _join(histories: Sequence[HistoryRow], shown: Sequence[HistoryRow], items: ItemIndex) -> tuple[_Past, _Past]:
    """Both kinds of history end to end, their items interned in one call."""
    names = list(chain.from_iterable(row.items for row in chain(histories, shown)))
    rows = items.intern(names) if names else np.empty(0, np.int32)
    first = _concatenate(histories, rows)
    return first, _concatenate(shown, rows[len(first.rows) :])


def _concatenate(histories: Sequence[HistoryRow], rows: I32) -> _Past:
    lengths = np.array([len(row.items) for row in histories], np.int64)
    ends = np.cumsum(lengths)
    return _Past(
        rows=rows[: int(ends[-1]) if len(ends) else 0],
        ts=np.concatenate([row.ts for row in histories]) if histories else np.empty(0, np.int64),
        types=np.concatenate([row.types for row in histories]) if histories else np.empty(0, np.uint8),
        starts=ends - lengths,
        ends=ends,
    )

"""Lookup: the ladder. Per candidate the best tier that has a vector: exact, else the user's mean, else a neighbour's, else none.

In: a user's pairs, its 24 h mean and what its neighbours said, for r requests with n pairs in all. Out: `Vectors` in three slots
(never mixed into one) and each pair's tier and age. Never reads another embedding space, never renews an age, never judges by
anything but event time: fresh iff now - as_of < ttl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from models.features import F32, I32, I64, U8, Vectors
from models.jit import compiled, number, reads, writes
from schemas.ranking import TIERS
from streams.aggregate import Means
from streams.cache import PairRows

EXACT, USER, NEIGHBOR, NONE = range(len(TIERS))
MISSING = -1
"""Age of a vector that is not there."""


@dataclass(frozen=True, slots=True)
class Neighborhood:
    """What neighbours said of r requests: `vector` float32 [r, d], zeros where there is none, `age_ms` int64 [r] (-1 = none)."""

    vector: F32
    age_ms: I64


@dataclass(frozen=True, slots=True)
class Found:
    """Vectors for the ranker; `tier` uint8 [n] indexes TIERS; `age_ms` int64 [n] is the age of that tier's vector (-1 = none)."""

    vectors: Vectors
    tier: U8
    age_ms: I64


def lookup(
    candidates: Sequence[Sequence[str]],
    request: I32,
    now: I64,
    pairs: Sequence[PairRows],
    means: Means,
    neighbors: Neighborhood,
    ttl_ms: int,
) -> Found:
    """`candidates` has r lists with n items in all, `request` int32 [n], `now` int64 [r]; `pairs` has r entries in one space."""
    n, d = len(request), means.mean.shape[1]
    user_age = mean_age(means, now)
    vectors = Vectors(
        np.empty((n, d), np.float32), np.empty(n, np.int64), means.mean, user_age, neighbors.vector, neighbors.age_ms
    )
    found = Found(vectors, np.empty(n, np.uint8), np.empty(n, np.int64))
    as_of, scales, codes = _end_to_end(pairs, d)
    _ladder(
        _places(candidates, pairs), request, now, as_of, scales, codes, user_age, neighbors.age_ms, ttl_ms,
        vectors.exact, vectors.exact_age_ms, found.tier, found.age_ms,
    )  # fmt: skip
    return found


def mean_age(means: Means, now: I64) -> I64:
    """Age of each user's mean: that of its newest vector, int64 [r]; -1 where there is no mean."""
    return np.where(means.count > 0, np.maximum(now - means.newest_ms, 0), MISSING)


def _places(candidates: Sequence[Sequence[str]], pairs: Sequence[PairRows]) -> I64:
    """Where each candidate's vector lies in the users' pairs end to end, int64 [n]; -1: nowhere."""
    found: list[int] = []
    first = 0
    for names, rows in zip(candidates, pairs, strict=True):
        if rows.items:
            places = dict(zip(rows.items, range(first, first + len(rows.items)), strict=True))
            found += map(places.get, names, repeat(MISSING))
        else:
            found += [MISSING] * len(names)
        first += len(rows.items)
    return np.array(found, np.int64)


def _end_to_end(pairs: Sequence[PairRows], d: int) -> tuple[I64, F32, npt.NDArray[np.int8]]:
    if not pairs:
        return np.empty(0, np.int64), np.empty(0, np.float32), np.empty((0, d), np.int8)
    return (
        np.concatenate([rows.as_of for rows in pairs]),
        np.concatenate([rows.scales for rows in pairs]),
        np.concatenate([rows.codes for rows in pairs]),
    )


@compiled(
    reads(np.int64), reads(np.int32), reads(np.int64), reads(np.int64), reads(np.float32), reads(np.int8, 2),
    reads(np.int64), reads(np.int64), number(np.int64),
    writes(np.float32, 2), writes(np.int64), writes(np.uint8), writes(np.int64),
)  # fmt: skip
def _ladder(
    place: I64, request: I32, now: I64, as_of: I64, scales: F32, codes: npt.NDArray[np.int8],
    user_age: I64, neighbor_age: I64, ttl_ms: int,
    exact: F32, exact_age: I64, tier: U8, best_age: I64,
) -> None:  # fmt: skip
    """Each pair's exact vector and its age, its tier and that tier's age.

    A vector from ahead of `now` (the embeddings were read before the events that they follow) has age 0, so that a TTL of 0 is off
    for it too.
    """
    for i in range(len(request)):
        q, at = request[i], place[i]
        age = max(now[q] - as_of[at], 0) if at >= 0 else ttl_ms
        if age < ttl_ms:
            exact_age[i] = age
            for k in range(exact.shape[1]):
                exact[i, k] = codes[at, k] * scales[at]
        else:
            exact_age[i] = MISSING
            exact[i, :] = 0.0
        if exact_age[i] >= 0:
            tier[i], best_age[i] = EXACT, age
        elif user_age[q] >= 0:
            tier[i], best_age[i] = USER, user_age[q]
        elif neighbor_age[q] >= 0:
            tier[i], best_age[i] = NEIGHBOR, neighbor_age[q]
        else:
            tier[i], best_age[i] = NONE, MISSING

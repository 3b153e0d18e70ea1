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

from models.features import F32, I32, I64, U8, Vectors
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
    exact, exact_age = _exact(candidates, now, pairs, means.mean.shape[1], ttl_ms)
    user_age = mean_age(means, now)
    vectors = Vectors(exact, exact_age, means.mean, user_age, neighbors.vector, neighbors.age_ms)
    ages = np.stack((exact_age, user_age[request], neighbors.age_ms[request]))
    tier = np.where((ages >= 0).any(0), (ages >= 0).argmax(0), NONE).astype(np.uint8)
    best = np.where(
        tier == NONE, MISSING, np.take_along_axis(ages, np.minimum(tier, NEIGHBOR)[None].astype(np.intp), 0)[0]
    )
    return Found(vectors, tier, best)


def mean_age(means: Means, now: I64) -> I64:
    """Age of each user's mean: that of its newest vector, int64 [r]; -1 where there is no mean."""
    return np.where(means.count > 0, np.maximum(now - means.newest_ms, 0), MISSING)


def _exact(
    candidates: Sequence[Sequence[str]], now: I64, pairs: Sequence[PairRows], d: int, ttl_ms: int
) -> tuple[F32, I64]:
    """Fresh vectors of the pairs, float32 [n, d], and their ages.

    A vector from ahead of `now` (the embeddings were read before the events that they follow) has age 0, so that a TTL of 0 is off
    for it too.
    """
    sizes = [len(names) for names in candidates]
    vectors, ages = np.zeros((sum(sizes), d), np.float32), np.full(sum(sizes), MISSING, np.int64)
    found: list[int] = []
    first = 0
    for names, rows in zip(candidates, pairs, strict=True):
        if rows.items:
            places = dict(zip(rows.items, range(first, first + len(rows.items)), strict=True))
            found += map(places.get, names, repeat(MISSING))
        else:
            found += [MISSING] * len(names)
        first += len(rows.items)
    place = np.array(found, np.int64)
    hits = np.flatnonzero(place >= 0)
    if not len(hits):
        return vectors, ages
    place = place[hits]
    age = np.maximum(np.repeat(now, sizes)[hits] - np.concatenate([rows.as_of for rows in pairs])[place], 0)
    fresh = age < ttl_ms
    hits, place = hits[fresh], place[fresh]
    ages[hits] = age[fresh]
    scales = np.concatenate([rows.scales for rows in pairs])[place, None]
    vectors[hits] = np.concatenate([rows.codes for rows in pairs])[place] * scales
    return vectors, ages

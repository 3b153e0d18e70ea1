"""The ladder: best tier there is, TTL judged on read, slots never mixed."""

from __future__ import annotations

import numpy as np
import pytest

from schemas.ranking import TIERS
from streams.aggregate import Means
from streams.cache import PairRows
from streams.lookup import Found, Neighborhood, lookup, mean_age

NOW, TTL = 1_000_000, 1000


def _rows(**as_of: int) -> PairRows:
    m = len(as_of)
    codes = np.arange(1, 2 * m + 1, dtype=np.int8).reshape(m, 2)
    return PairRows(list(as_of), np.array(list(as_of.values()), np.int64), np.full(m, 0.5, np.float32), codes)


def _look(
    candidates: list[str], rows: PairRows, mean: int | None = None, near: int | None = None, ttl_ms: int = TTL
) -> Found:
    """One request; `mean` is the newest as_of of the user's mean, `near` the age of the neighbours' vector."""
    count = np.array([0 if mean is None else 3], np.int64)
    means = Means(
        np.full((1, 2), 7.0 if mean is not None else 0.0, np.float32),
        count,
        np.array([-1 if mean is None else mean], np.int64),
    )
    said = Neighborhood(
        np.full((1, 2), 9.0 if near is not None else 0.0, np.float32),
        np.array([-1 if near is None else near], np.int64),
    )
    return lookup(
        [candidates], np.zeros(len(candidates), np.int32), np.array([NOW], np.int64), [rows], means, said, ttl_ms
    )


def _tiers(found: Found) -> list[str]:
    return [TIERS[tier] for tier in found.tier]


@pytest.mark.parametrize(
    ("mean", "near", "expected", "age"),
    [(NOW - 9, 5, "user", 9), (NOW - 9, None, "user", 9), (None, 5, "neighbor", 5), (None, None, "none", -1)],
)
def test_a_miss_takes_the_best_fallback(mean: int | None, near: int | None, expected: str, age: int) -> None:
    found = _look(["a", "b"], _rows(a=NOW - 4), mean, near)
    assert _tiers(found) == ["exact", expected]
    assert found.age_ms.tolist() == [4, age]
    assert found.vectors.exact.tolist() == [[0.5, 1.0], [0.0, 0.0]]
    assert found.vectors.exact_age_ms.tolist() == [4, -1]
    assert (found.vectors.user == 7.0).all() == (mean is not None)
    assert (found.vectors.neighbor == 9.0).all() == (near is not None)


@pytest.mark.parametrize(
    ("as_of", "ttl_ms", "fresh"),
    [
        (NOW - TTL + 1, TTL, True),
        (NOW - TTL, TTL, False),  # at exactly the TTL it is expired
        (NOW - TTL - 1, TTL, False),
        (NOW, 1, True),
        (NOW, 0, False),  # 0 = off
        (NOW + 5, 0, False),  # also for a vector from ahead of the events
        (NOW + 5, TTL, True),
    ],
)
def test_ttl_boundaries(as_of: int, ttl_ms: int, fresh: bool) -> None:
    found = _look(["a"], _rows(a=as_of), ttl_ms=ttl_ms)
    assert _tiers(found) == ["exact" if fresh else "none"]
    assert found.age_ms.tolist() == [max(NOW - as_of, 0) if fresh else -1]
    assert found.vectors.exact.any() == fresh


def test_ttl_takes_effect_at_once() -> None:
    rows = _rows(a=NOW - 500)
    assert [_tiers(_look(["a"], rows, ttl_ms=ttl)) for ttl in (400, 501, 500)] == [["none"], ["exact"], ["none"]]


def test_requests_keep_apart() -> None:
    means = Means(np.zeros((3, 2), np.float32), np.array([0, 1, 0]), np.array([-1, NOW, -1]))
    near = Neighborhood(np.zeros((3, 2), np.float32), np.array([-1, -1, 3]))
    found = lookup(
        [["a", "b"], [], ["b", "a"]], np.array([0, 0, 2, 2], np.int32), np.full(3, NOW), [_rows(a=NOW), _rows(a=NOW), _rows(b=NOW)],
        means, near, TTL,
    )  # fmt: skip
    assert _tiers(found) == ["exact", "none", "exact", "neighbor"]
    assert mean_age(means, np.full(3, NOW + 7)).tolist() == [-1, 7, -1]


def test_nothing_asked_nothing_found() -> None:
    assert len(_look([], _rows(a=NOW), NOW).tier) == 0

"""Order and shape of results: ties, numbers that are not finite at every place, the fallback order."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from schemas.ranking import Basis, RankedResult, encode_result
from streams.rank import fallback, order, ranked
from tests.streams.serving import NOW, request

BASIS = Basis(0, 1, 2, 3, 4, "bundle", "config")
BAD = (math.nan, math.inf, -math.inf)


def _ranked(scores: list[float], names: list[str], shadow: list[float] | None = None) -> RankedResult:
    n = len(names)
    other = None if shadow is None else np.array(shadow)
    tiers, ages = np.full(n, 3, np.uint8), np.full(n, -1)
    return next(ranked([request("r", "u", names)], [NOW], np.array(scores), other, tiers, ages, [BASIS]))


def test_higher_scores_first_ties_by_id() -> None:
    names = ["b", "a", "é", "B", "c"]
    assert [names[at] for at in order(np.array([0.5, 0.5, 0.5, 0.5, 0.9]), names)] == ["c", "B", "a", "b", "é"]
    assert [names[at] for at in order(np.array([0.0, -0.0, 0.0, -0.0, 0.0]), names)] == ["B", "a", "b", "c", "é"]


def test_bad_scores_come_after_zero_and_below() -> None:
    names = ["a", "b", "c", "d"]
    assert order(np.array([math.nan, -1.0, math.inf, 0.0]), names) == [3, 1, 0, 2]


@pytest.mark.parametrize("places", list(itertools.combinations(range(5), 2)))
@pytest.mark.parametrize("bad", list(itertools.product(BAD, repeat=2)))
def test_bad_scores_come_last_at_every_place(places: tuple[int, int], bad: tuple[float, float]) -> None:
    names, scores = ["e", "d", "c", "b", "a"], [0.1, 0.9, 0.5, 0.7, 0.3]
    good = [(-score, names[at]) for at, score in enumerate(scores) if at not in places]
    expected = [name for _, name in sorted(good)]
    for place, score in zip(places, bad, strict=True):
        scores[place] = score
    result = _ranked(scores, names)
    assert [item.item_id for item in result.items] == expected + sorted(names[place] for place in places)
    assert [item.bad_score for item in result.items] == [False] * 3 + [True] * 2
    assert [item.score for item in result.items[3:]] == [None, None]

    def no_constant(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    assert len(json.loads(encode_result(result), parse_constant=no_constant)["items"]) == 5


def test_a_bad_shadow_score_is_left_out_and_changes_no_order() -> None:
    result = _ranked([0.1, 0.2], ["a", "b"], shadow=[0.9, math.nan])
    assert [(item.item_id, item.score, item.shadow_score, item.bad_score) for item in result.items] == [
        ("b", 0.2, None, False),
        ("a", 0.1, 0.9, False),
    ]


def test_items_keep_their_own_tier_and_age() -> None:
    asked = [request("r", "u", ["a", "b"]), request("s", "v", []), request("t", "w", ["c", "a"], duplicates=True)]
    columns = np.array([0.1, 0.3, 0.2, 0.4]), None, np.array([0, 3, 1, 2], np.uint8), np.array([5, -1, 7, 9])
    results = list(ranked(asked, [NOW, NOW + 1, NOW + 2], *columns, [BASIS] * 3, ("degraded",)))
    assert [[(item.item_id, item.tier, item.age_ms) for item in result.items] for result in results] == [
        [("b", "none", None), ("a", "exact", 5)],
        [],
        [("a", "neighbor", 9), ("c", "user", 7)],
    ]
    assert [(result.request_id, result.user_id, result.ts) for result in results] == [
        ("r", "u", NOW),
        ("s", "v", NOW + 1),
        ("t", "w", NOW + 2),
    ]
    assert [result.flags for result in results] == [["degraded"], ["degraded"], ["degraded", "duplicate_candidates"]]
    assert results[0].basis == BASIS


def test_fallback_order_is_popularity_then_id() -> None:
    counts = np.array([[5, 1], [9, 1], [0, 4], [5, 1]])
    result = fallback(request("r", "u", ["b", "c", "d", "a"]), NOW, counts, BASIS, ("degraded",))
    assert [item.item_id for item in result.items] == ["d", "c", "a", "b"]
    assert {(item.score, item.tier, item.bad_score) for item in result.items} == {(None, "none", False)}
    assert result.flags == ["degraded", "deadline"]


def test_empty_in_empty_out() -> None:
    assert _ranked([], []).items == []
    assert _ranked([], []).flags == []  # nothing went wrong, so nothing says so (schemas.ranking)
    assert fallback(request("r", "u", []), NOW, np.zeros((0, 2), np.int64), BASIS).items == []

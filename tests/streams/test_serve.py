"""Serve: every rule for requests, folds that are functions of offsets, and answers that do not depend on their company."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from models.ranker import Ranker, RankerConfig, RankerLike
from schemas.errors import ConfigError
from schemas.keys import hash64
from schemas.ranking import CheckedRequest, RankedResult, decode_result, encode_result
from streams.score import Scored
from streams.serve import Serve, ServeConfig
from streams.state.memory import MemoryStore
from tests.streams.fakes import FakeRanker, item_index
from tests.streams.serving import HOUR, NAMES, NOW, SPACE, D, events, request, serve, vectors

MINUTE = 60_000


def _tiers(result: RankedResult) -> dict[str, str]:
    return {item.item_id: item.tier for item in result.items}


def _busy(ranker: RankerLike | None = None, **settings: Any) -> Serve:
    """Six users with histories, three of them with vectors."""
    partition = serve(ranker, **settings)
    rng = np.random.default_rng(5)
    rows = []
    for _ in range(300):
        kind, ts = ("click", "view", "impression")[rng.integers(3)], NOW - int(rng.integers(1, 9 * HOUR))
        rows.append((f"u{rng.integers(6)}", NAMES[rng.integers(50)], kind, ts))
    partition.events(events(*rows), 300)
    partition.embeddings([vectors(f"u{u}", NAMES[u : u + 9], NOW - HOUR + u, value=u + 1) for u in range(3)], 3)
    partition.install(partition.generation())
    return partition


def test_one_result_a_request_in_order_with_its_basis() -> None:
    partition = _busy()
    partition.items_applied = 9
    results = partition.rank([request(f"r{n}", f"u{n % 8}", NAMES[:n], offset=40 + n) for n in range(12)])
    assert [(r.request_id, r.user_id, len(r.items)) for r in results] == [(f"r{n}", f"u{n % 8}", n) for n in range(12)]
    basis = results[3].basis
    assert (basis.partition, basis.request_offset, basis.events, basis.embeddings, basis.items) == (3, 43, 300, 3, 9)
    assert (basis.bundle, basis.config, basis.neighbors) == ("bundle", ServeConfig().hash(), (300, 3))
    assert ServeConfig(ttl_ms=1).hash() != ServeConfig().hash()


def test_the_ladder() -> None:
    partition = serve()
    partition.events(events(("u", "i1", "click", NOW - HOUR), ("like-u", "i1", "click", NOW - HOUR)), 2)
    partition.embeddings([vectors("u", ["i1"], NOW - HOUR), vectors("u", ["i2"], NOW - 5 * HOUR)], 2)
    partition.install(partition.generation())
    mine, alike, stranger = partition.rank([request(name, name, ["i1", "i2", "i3"]) for name in ("u", "like-u", "z")])
    assert _tiers(mine) == {"i1": "exact", "i2": "user", "i3": "user"}  # i2 is past its TTL of four hours
    assert {item.item_id: item.age_ms for item in mine.items} == dict.fromkeys(["i1", "i2", "i3"], HOUR)
    assert set(_tiers(alike).values()) == {"neighbor"}
    assert set(_tiers(stranger).values()) == {"none"}
    stats = partition.stats()
    assert [stats[f"tier_{tier}"] for tier in ("exact", "user", "neighbor", "none")] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("ttl_ms", "age_ms", "tier"), [(9, 8, "exact"), (9, 9, "user"), (9, 10, "user"), (0, 0, "user"), (0, -5, "user")]
)
def test_ttl_is_judged_at_the_requests_now(ttl_ms: int, age_ms: int, tier: str) -> None:
    partition = serve(ttl_ms=ttl_ms)
    partition.embeddings([vectors("u", ["i1"], NOW - age_ms)], 1)
    assert _tiers(partition.rank([request("r", "u", ["i1"])])[0]) == {"i1": tier}


def test_now_is_the_later_of_request_and_clock() -> None:
    partition = serve()
    partition.events(events(("u", "i1", "click", NOW)), 1)
    early, later = partition.rank([request("a", "u", ["i1"], ts=NOW - HOUR), request("b", "u", ["i1"], ts=NOW + 5)])
    assert (early.ts, later.ts) == (NOW, NOW + 5)
    assert partition.clock.now == NOW  # a request moves no clock
    again = Serve(3, "bundle", FakeRanker(), None, SPACE, D, ServeConfig(), partition.store, item_index(NAMES))
    assert again.clock.now == NOW


def test_another_space_is_a_miss_and_another_size_is_refused() -> None:
    partition = serve()
    partition.embeddings([vectors("u", ["i1"], NOW, space=SPACE + 1), vectors("u", ["i2"], NOW, d=D + 1)], 2)
    assert _tiers(partition.rank([request("r", "u", ["i1", "i2"])])[0]) == {"i1": "none", "i2": "none"}
    assert partition.stats()["embeddings_dimensions"] == 1


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 1000])
def test_any_number_of_candidates(n: int) -> None:
    names = [f"new-{x}" for x in range(n)]  # none of them is in the catalogue
    ranker = Ranker.untrained(RankerConfig(d=D, content_dims=4, item_buckets=64, user_buckets=64), seed=1)
    partition = Serve(0, "b", ranker, ranker, SPACE, D, ServeConfig(shadow=True), MemoryStore(), item_index(NAMES))
    both = partition.rank([request("r", "nobody", names), request("s", "nobody", [])])
    assert sorted(item.item_id for item in both[0].items) == sorted(names)
    assert both[1].items == []
    scores = [item.score for item in both[0].items if item.score is not None]
    assert len(scores) == n
    assert scores == sorted(scores, reverse=True)


def test_late_requests_get_the_fallback_order_and_no_ranker() -> None:
    ranker = FakeRanker()
    partition = serve(ranker)
    partition.events(events(("v", "i3", "click", NOW), ("v", "i2", "impression", NOW), ("w", "i3", "click", NOW)), 3)
    late, fine, empty = partition.rank(
        [request("a", "u", ["i1", "i2", "i3", "i0"]), request("b", "u", ["i1", "i2"]), request("c", "u", [])],
        [True, False, True],
    )
    assert [item.item_id for item in late.items] == ["i3", "i2", "i0", "i1"]
    assert (late.flags, fine.flags, empty.flags) == (["deadline"], [], ["deadline"])
    assert all(item.score is not None for item in fine.items)
    assert ranker.calls == 1
    assert partition.rank([request("a", "u", ["i1"])])[0] == late  # what was sent stands, though the repeat is in time
    assert partition.stats()["late"] == 2


def test_flags() -> None:
    partition = serve()
    both = partition.rank([request("a", "u", ["i1"], duplicates=True), request("b", "u", ["i1"])], degraded=True)
    assert [result.flags for result in both] == [["degraded", "duplicate_candidates"], ["degraded"]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_score_is_last_and_flagged(bad: float) -> None:
    partition = serve(FakeRanker({hash64("i2") % 1000: bad}))
    (data,) = partition.answer([request("r", "u", ["i2", "i1", "i3"])])
    items = json.loads(data)["items"]
    assert items[2] == {"item_id": "i2", "score": None, "tier": "none", "bad_score": True}
    assert partition.stats()["bad_scores"] == 1


def test_equal_scores_are_ordered_by_id() -> None:
    partition = serve(FakeRanker(constant=0.5))
    names = ["i5", "i10", "i1", "z", "é"]
    assert [item.item_id for item in partition.rank([request("r", "u", names)])[0].items] == [
        "i1",
        "i10",
        "i5",
        "z",
        "é",
    ]


def test_shadow_scores_are_the_base_rankers() -> None:
    partition = serve(base=FakeRanker(constant=0.25), shadow=True)
    assert {item.shadow_score for item in partition.rank([request("r", "u", NAMES[:5])])[0].items} == {0.25}
    assert serve(base=FakeRanker(constant=0.25)).rank([request("r", "u", ["i1"])])[0].items[0].shadow_score is None
    with pytest.raises(ConfigError, match="no base ranker"):
        serve(shadow=True)


def test_a_repeat_gets_the_stored_bytes_for_ten_minutes() -> None:
    partition = _busy()
    asked = request("r", "u1", NAMES[:20])
    (first,) = partition.answer([asked])
    partition.events(events(("u1", "i1", "click", NOW + 10 * MINUTE - 1), first=300), 301)
    assert partition.answer([asked]) == [first]
    assert encode_result(partition.rank([asked])[0]) == first
    partition.events(events(("u1", "i1", "click", NOW + 10 * MINUTE), first=301), 302)
    (second,) = partition.answer([asked])
    assert decode_result(second).ts == NOW + 10 * MINUTE
    assert partition.stats()["repeated"] == 2


def test_one_id_twice_in_one_batch() -> None:
    partition = _busy()
    asked = [request("r", "u1", NAMES[:5]), request("r", "u2", NAMES[:5]), request("r", "u1", NAMES[:2])]
    first, other, second = partition.answer(asked)
    assert first == second != other
    assert partition.stats()["repeated"] == 1


def test_answers_survive_a_restart_through_the_topic() -> None:
    partition, successor = _busy(), _busy(ttl_ms=HOUR)
    (sent,) = partition.answer([request("r", "u1", NAMES[:9])])
    successor.remember([sent])
    assert successor.answer([request("r", "u1", NAMES[:9])]) == [sent]


def _all_of(partition: Serve, asked: list[CheckedRequest]) -> list[bytes]:
    """Each request asked alone, of a partition that forgets its answers."""
    return [partition.answer([one])[0] for one in asked]


@pytest.mark.parametrize("real", [False, True])
def test_alone_and_in_a_batch_give_equal_bytes(real: bool) -> None:
    config = RankerConfig(d=D, content_dims=4, item_buckets=64, user_buckets=64)
    ranker = Ranker.untrained(config, seed=1) if real else FakeRanker()
    rng = np.random.default_rng(3)
    asked = []
    for n in range(14):
        names = [NAMES[x] for x in rng.choice(200, n * 13, replace=False)]
        asked.append(request(f"r{n}", f"u{rng.integers(8)}", names, NOW + int(rng.integers(HOUR)), n))
    together, apart = (_busy(ranker, answers_bytes_max=0) for _ in range(2))
    batch = together.answer(asked)
    assert batch == _all_of(apart, asked)
    assert batch == together.answer(asked)  # nothing was remembered: computed again
    assert batch == list(reversed(together.answer(asked[::-1])))
    assert {tier for data in batch for tier in _tiers(decode_result(data)).values()} == {
        "exact",
        "user",
        "neighbor",
        "none",
    }


def test_batches_may_be_cut_anywhere() -> None:
    rows = [(f"u{n % 5}", NAMES[n % 17], ("click", "impression")[n % 2], NOW - (97 * n) % HOUR) for n in range(60)]
    whole, pieces = serve(), serve()
    whole.events(events(*rows), 60)
    messages = [vectors(f"u{n % 5}", NAMES[n : n + 4], NOW - n * MINUTE, value=n + 1) for n in range(12)]
    whole.embeddings(messages, 12)
    for at in range(12):
        pieces.embeddings(messages[at : at + 1], at + 1)
        pieces.events(events(*rows[5 * at : 5 * at + 5], first=5 * at), 5 * at + 5)
    for partition in (whole, pieces):
        partition.install(partition.generation())
    asked = [request(f"r{u}", f"u{u}", NAMES[:30]) for u in range(8)]
    assert whole.answer(asked) == pieces.answer(asked)


def test_a_repeated_batch_of_vectors_changes_nothing() -> None:
    once, twice = serve(), serve()
    messages = [vectors("u", ["i1", "i2"], NOW - HOUR, value=4)]
    once.embeddings(messages, 1)
    twice.embeddings(messages, 1)
    once.embeddings([], 2)
    twice.embeddings(messages, 2)
    asked = [request("r", "u", ["i1", "i5"])]
    assert once.answer(asked) == twice.answer(asked)
    assert twice.stats()["vectors_duplicate"] == 2


def test_the_observer_sees_what_was_scored() -> None:
    partition, seen = _busy(), list[tuple[int, Scored]]()
    partition.observer = lambda asked, scored: seen.append((len(asked), scored))
    partition.rank(
        [request("a", "u1", NAMES[:5]), request("b", "u1", []), request("c", "u2", ["i1"])], [False, False, True]
    )
    partition.rank([request("a", "u1", NAMES[:5])])
    ((count, scored),) = seen
    assert (count, len(scored.scores), scored.found.vectors.exact.shape) == (1, 5, (5, D))

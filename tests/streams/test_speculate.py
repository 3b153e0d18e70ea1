"""The whole of speculation on a world with stationary demand, and the rules of its three inputs one by one."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from models.priors import Priors
from schemas.events import EventBatch, type_code
from schemas.inference import SOURCES, FmRequest, decode_fm_request, encode_fm_request
from schemas.topics import EVENTS
from streams.history import History
from streams.items import ItemIndex
from streams.predict import PredictConfig
from streams.speculate import Speculate, SpeculateConfig
from streams.state.memory import MemoryStore
from streams.verify import VerifyConfig
from tests.oracles.demand import START_MS, FlatRanker, Played, World, embeddings, play, result

HOUR, MINUTE, SPACE = 3_600_000, 60_000, 7
UNLIMITED = VerifyConfig(pairs_per_s=float("inf"))


def speculate(
    world: World | None = None,
    sources: tuple[str, ...] = SOURCES,
    verify: VerifyConfig = UNLIMITED,
    store: MemoryStore | None = None,
    priors: Priors | None = None,
    **more: object,
) -> Speculate:
    index = ItemIndex()
    index.update((world or World(0, items=50)).catalogue())
    config = SpeculateConfig(predict=PredictConfig(sources=sources, sample_rate=0.1), verify=verify)
    config = dataclasses.replace(config, **more)  # type: ignore[arg-type]
    return Speculate(0, FlatRanker(), priors, SPACE, config, store or MemoryStore(), index, 1)


def events(*rows: tuple[str, str, str, int], first: int = 0) -> EventBatch:
    """(user, item, type, minutes since the start)."""
    ts = np.array([START_MS + row[3] * MINUTE for row in rows], np.int64)
    types = np.array([type_code(row[2]) for row in rows], np.uint8)
    offsets = np.arange(first, first + len(rows))
    return EventBatch(0, offsets, ts, ts, [row[0] for row in rows], [row[1] for row in rows], types)


def answer(user: str, minute: int, hits: dict[str, bool], flags: tuple[str, ...] = ()) -> object:
    return result(user, START_MS + minute * MINUTE, list(hits), list(hits.values()), flags)


Runs = dict[str, tuple[Speculate, Played, World]]


def pairs(requests: list[FmRequest]) -> set[tuple[str, str]]:
    return {(request.user, item) for request in requests for item in request.items}


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Twenty hours; what is measured are the last ten."""
    made: Runs = {}
    for name, sources, verify in (
        ("reactive", ("reactive",), UNLIMITED),
        ("frugal", SOURCES, VerifyConfig(pairs_per_s=0.2)),
        ("per_ranked", SOURCES, VerifyConfig(pairs_per_ranked=1.5)),
    ):
        world = World(3, users=80, items=1_000)
        one = speculate(world, sources, verify)
        made[name] = one, play(world, one, 1_200, 600), world
    return made


def test_speculation_covers_more_than_the_reactive_baseline(runs: Runs) -> None:
    reactive, frugal, per_ranked = (runs[name][1] for name in ("reactive", "frugal", "per_ranked"))
    assert 0.3 < reactive.coverage < 0.6
    assert frugal.coverage > reactive.coverage + 0.05  # for about the same FM work
    assert frugal.fm_pairs < 1.4 * reactive.fm_pairs
    assert per_ranked.coverage > reactive.coverage + 0.12


def test_the_budget_holds_within_five_per_cent(runs: Runs) -> None:
    _, frugal, _ = runs["frugal"]
    _, per_ranked, _ = runs["per_ranked"]
    assert frugal.fm_pairs == pytest.approx(0.2 * 600 * 60, rel=0.05)
    assert per_ranked.fm_pairs == pytest.approx(1.5 * per_ranked.ranked, rel=0.05)


def test_forecasts_are_calibrated(runs: Runs) -> None:
    asked = runs["frugal"][0].stats()["asked"]
    assert asked["labels"] > 10_000
    assert asked["calibration_error"] < 0.03
    often = [row for row in asked["reliability"] if row["count"] > 150]
    assert len(often) >= 8
    for row in often:
        noise = (row["observed"] * (1 - row["observed"]) / row["count"]) ** 0.5
        assert abs(row["predicted"] - row["observed"]) < 0.06 + 3 * noise


def test_priors_carry_what_was_learned_to_a_new_partition(runs: Runs) -> None:
    teacher, _, world = runs["frugal"]
    priors = Priors.from_state(teacher.priors().state())
    assert len(priors.items) > 500
    cold, warm = (speculate(world, priors=given) for given in (None, priors))
    seen = priors.items[0]
    made = {name: one.events(events(("new", seen, "click", 0)), 1)[0] for name, one in (("cold", cold), ("warm", warm))}
    assert set(made["cold"].items) == {seen}
    assert {SOURCES[code] for code in made["warm"].sources} >= {"revisit", "covisit", "popular"}
    popular = {
        item for item, code in zip(made["warm"].items, made["warm"].sources, strict=True) if SOURCES[code] == "popular"
    }
    assert len(popular & set(priors.items[:60])) > 20
    neighbors = teacher.predictor.covisits.read(teacher.predictor.table.intern([seen], 0))[0][0]
    covisited = {
        item for item, code in zip(made["warm"].items, made["warm"].sources, strict=True) if SOURCES[code] == "covisit"
    }
    assert covisited <= {teacher.predictor.table.names[slot] for slot in neighbors[neighbors >= 0]}
    assert (warm.asked.weights == teacher.asked.weights).all()
    assert warm.stats()["asked"]["labels"] == 0


def test_the_same_inputs_give_the_same_requests() -> None:
    first, second = (play(world := World(5), speculate(world), 90, 0).requests for _ in range(2))
    assert [encode_fm_request(r) for r in first] == [encode_fm_request(r) for r in second]
    assert first


def test_stats_are_json(runs: Runs) -> None:
    for one, played, _ in runs.values():
        stats = json.loads(json.dumps(one.stats()))
        assert stats["admitted"] == sum(played.per_step)
        assert stats["candidates"] == stats["admitted"] + sum(stats["dropped"].values())


def test_a_request_holds_the_history_after_the_batch_and_the_clock() -> None:
    one = speculate()
    one.events(events(("u", "i1", "click", 0), ("u", "i2", "impression", 1)), 2)
    made = one.events(events(("u", "i3", "view", 5), ("v", "i9", "impression", 7), first=2), 4)
    (request,) = made
    assert (request.user, request.as_of, request.space) == ("u", START_MS + 7 * MINUTE, SPACE)
    assert request.history_items == ["i1", "i2", "i3"]  # what was shown tells the FM as much as what was touched
    assert request.history_ts.tolist() == [START_MS, START_MS + MINUTE, START_MS + 5 * MINUTE]
    assert (request.events_offset, request.results_offset) == (4, -1)
    assert decode_fm_request(encode_fm_request(request)).items == request.items


def test_impressions_fold_and_trigger_nothing() -> None:
    one = speculate()
    assert one.events(events(("u", "i1", "impression", 0)), 1) == []
    assert ("u", "i1") in pairs(one.events(events(("u", "i2", "click", 1), first=1), 2))  # a revisit of what was shown


def test_a_user_is_predicted_once_in_the_gap() -> None:
    one = speculate()
    assert one.events(events(("u", "i1", "click", 0), ("u", "i2", "click", 0)), 2)
    one.heads([], 0)
    assert one.events(events(("u", "i3", "click", 0), first=2), 3) == []
    assert ("u", "i3") in pairs(one.events(events(("u", "i4", "click", 1), first=3), 4))
    assert one.stats()["predictions"] == 2


def test_a_missed_pair_is_asked_for_even_in_the_gap() -> None:
    one = speculate(sources=("reactive",))
    one.events(events(("u", "i1", "click", 0)), 1)
    missed = one.results([answer("u", 0, {"i5": False, "i6": True, "i7": False})], 1)
    assert pairs(missed) == {("u", "i5"), ("u", "i7")}
    assert missed[0].sources.tolist() == [0, 0]
    assert missed[0].results_offset == 1


def test_a_degraded_result_is_demand_but_no_miss() -> None:
    one = speculate(sources=("reactive",))
    assert one.results([answer("u", 0, {"i5": False}, ("degraded",))], 1) == []
    assert one.stats()["ranked"] == 1


def test_what_is_in_flight_or_fresh_is_not_asked_for_again() -> None:
    one = speculate(sources=("reactive",), ttl_ms=HOUR, verify=dataclasses.replace(UNLIMITED, refresh_ms=0))
    (request,) = one.results([answer("u", 0, {"i5": False})], 1)
    assert one.results([answer("u", 1, {"i5": False})], 2) == []
    one.heads([embeddings(request)], 1)
    assert one.results([answer("u", 59, {"i5": False})], 3) == []
    assert pairs(one.results([answer("u", 60, {"i5": False})], 4)) == {("u", "i5")}
    assert one.stats()["dropped"] == {"in_flight": 1, "fresh": 1} | {
        reason: 0 for reason in one.stats()["dropped"] if reason not in ("in_flight", "fresh")
    }


def test_an_embedding_of_another_space_is_none() -> None:
    one = speculate(sources=("reactive",))
    (request,) = one.results([answer("u", 0, {"i5": False})], 1)
    one.heads([dataclasses.replace(embeddings(request), space=SPACE + 1)], 1)
    assert pairs(one.results([answer("u", 7, {"i5": False})], 2)) == {("u", "i5")}  # no longer in flight, not fresh
    assert one.stats()["other_space"] == 1


def test_records_below_the_stamp_are_not_folded_and_below_answer_from_not_answered() -> None:
    store = MemoryStore()
    one = speculate(store=store)
    batch = events(("u", "i1", "click", 0), ("v", "i2", "click", 1), ("w", "i3", "click", 2))
    made = one.events(batch, 3, answer_from=1)
    assert {request.user for request in made} == {"v", "w"}
    again = speculate(store=store)
    repeated = again.events(batch, 3, answer_from=2)
    assert {request.user for request in repeated} <= {"w"}
    history = History("history", 100, impressions=False)
    assert [row.items for row in history.read(store, ["u", "v", "w"])] == [["i1"], ["i2"], ["i3"]]
    assert store.stamp(EVENTS.name) == 3
    mixed = events(("u", "i1", "click", 0), ("u", "i4", "click", 3), first=2)
    again.events(mixed, 4)
    assert history.read(store, ["u"])[0].items == ["i1", "i4"]


def test_folds_do_not_show_how_batches_were_cut() -> None:
    rows = [(f"u{k % 3}", f"i{k % 7}", "click" if k % 2 else "impression", k) for k in range(40)]
    hashes = []
    for size in (1, 7, 40):
        store = MemoryStore()
        one = speculate(store=store)
        for first in range(0, 40, size):
            part = rows[first : first + size]
            one.events(events(*part, first=first), first + len(part))
        hashes.append([list(store.rows(table)) for table in ("history", "shown", "item_counters", "user_counters")])
    assert hashes[0] == hashes[1] == hashes[2]


def test_nothing_in_nothing_out() -> None:
    one = speculate()
    empty = EventBatch(0, *(np.zeros(0, np.int64),) * 3, [], [], np.zeros(0, np.uint8))
    assert one.events(empty, 0) == []
    assert one.results([], 0) == []
    one.heads([], 0)
    assert one.results([answer("u", 0, {})], 1) == []
    assert one.events(empty, 5) == []
    assert one.store.stamp(EVENTS.name) == 5

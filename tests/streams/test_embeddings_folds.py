"""The pair table and the user means: a function of the log alone, equal to the dumb oracle; edges of TTL and window."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import BadRecord, StateError
from schemas.inference import Embeddings
from streams.aggregate import FIXED_POINT, VALUE_MAX, Aggregate
from streams.cache import Cache
from streams.state.memory import MemoryStore
from streams.state.prune import Pruner, Rules, state_hash
from streams.state.store import FoldCounts, Transaction
from tests.oracles import folds as oracle
from tests.oracles.folds import HOUR_MS, LoggedVector
from tests.streams import logs

DAY_MS = 24 * HOUR_MS
PANE_MS = 600_000


class Worker:
    """The folds of embeddings over one store."""

    def __init__(self, ttl_ms: int = 4 * HOUR_MS) -> None:
        self.store = MemoryStore()
        self.cache = Cache(ttl_ms, logs.DIMENSIONS)
        self.aggregate = Aggregate(logs.DIMENSIONS, PANE_MS, DAY_MS)

    @property
    def rules(self) -> Rules:
        return {**self.cache.rules(), **self.aggregate.rules()}

    def fold(self, batch: list[Embeddings]) -> tuple[FoldCounts, list[bool]]:
        txn = Transaction(self.store)
        counts, masks = self.cache.fold(batch, txn)
        self.aggregate.fold(batch, masks, txn)
        self.store.commit(txn)
        return counts, [bool(taken) for mask in masks for taken in mask]

    def rows(self) -> list[list[tuple[bytes, bytes]]]:
        return [list(self.store.rows(table)) for table in ("pairs", "user_panes")]


def message(as_of: int, items: list[str], scale: float = 1.0, code: int = 1) -> Embeddings:
    n = len(items)
    return Embeddings("u", 7, as_of, -1, items, np.full(n, scale, np.float32), np.full((n, 3), code, np.int8))


@logs.quick
@given(logs.vectors, logs.cuts)
def test_the_cut_of_the_batches_does_not_show(log: list[LoggedVector], cuts: set[int]) -> None:
    whole, cut = Worker(), Worker()
    counts, taken = whole.fold(logs.messages(log))
    cut_counts, cut_taken = FoldCounts(), []
    for piece in logs.pieces(len(log), cuts):
        more, masks = cut.fold(logs.messages(log, piece))
        cut_counts += more
        cut_taken += masks
    assert (cut.rows(), cut_counts, cut_taken) == (whole.rows(), counts, taken)


@logs.quick
@given(logs.vectors)
def test_pairs_are_the_newest_of_each(log: list[LoggedVector]) -> None:
    worker = Worker()
    counts, taken = worker.fold(logs.messages(log))
    cached, fates = oracle.pairs(log)
    assert taken == [fate == "accepted" for fate in fates]
    assert counts == FoldCounts(*[fates.count(fate) for fate in ("accepted", "duplicate", "late")])
    for user, space in {(vector.user, vector.space) for vector in log} | {("stranger", 7)}:
        rows = worker.cache.read(worker.store, user, space)
        found = zip(rows.items, rows.as_of.tolist(), rows.scales.tolist(), map(tuple, rows.codes.tolist()), strict=True)
        wanted = [v for (owner, other, _), v in cached.items() if (owner, other) == (user, space)]
        assert sorted(found) == sorted((v.item, v.as_of, v.scale, v.code) for v in wanted)
        assert rows.codes.shape == (len(wanted), logs.DIMENSIONS)


@logs.quick
@given(logs.vectors, logs.cuts, st.integers(0, 30 * HOUR_MS))
def test_means_are_those_of_the_window(log: list[LoggedVector], cuts: set[int], later: int) -> None:
    worker = Worker()
    for piece in logs.pieces(len(log), cuts):
        worker.fold(logs.messages(log, piece))
    now = max([vector.as_of for vector in log], default=logs.BASE) - 20 * HOUR_MS + later
    users = sorted({vector.user for vector in log} | {"stranger"})
    for space in (0, 7, 2**64 - 1):
        means = worker.aggregate.mean(worker.store, users, space, now)
        for row, user in enumerate(users):
            exact, count, newest = oracle.mean(log, user, space, now, PANE_MS, DAY_MS)
            assert (means.count[row], means.newest_ms[row]) == (count, newest)
            wanted = np.array([float(number) for number in exact] or [0.0] * logs.DIMENSIONS)
            # Each vector is rounded once, to half a unit; then the mean once more, to float32.
            assert means.mean[row] == pytest.approx(wanted, rel=2e-7, abs=0.5 / FIXED_POINT)


@logs.quick
@given(logs.vectors, st.randoms(use_true_random=False))
def test_sums_do_not_show_the_order_of_what_was_taken(log: list[LoggedVector], random: object) -> None:
    log = [vector for vector, fate in zip(log, oracle.pairs(log)[1], strict=True) if fate == "accepted"]
    mixed = list(log)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    stores = MemoryStore(), MemoryStore()
    for store, part in zip(stores, (log, mixed), strict=True):
        batch, txn = logs.messages(part), Transaction(store)
        masks = [np.ones(len(embeddings.items), np.bool_) for embeddings in batch]
        Aggregate(logs.DIMENSIONS, PANE_MS, DAY_MS).fold(batch, masks, txn)
        store.commit(txn)
    assert list(stores[0].rows("user_panes")) == list(stores[1].rows("user_panes"))


@logs.quick
@given(logs.vectors, logs.cuts)
def test_pruning_shows_neither_in_answers_nor_in_the_hash(log: list[LoggedVector], cuts: set[int]) -> None:
    kept, pruned = Worker(), Worker()
    pruner, now = Pruner(pruned.rules), 0
    for piece in logs.pieces(len(log), cuts):
        for worker in (kept, pruned):
            worker.fold(logs.messages(log, piece))
        now = max([now, *[vector.as_of for vector in log[piece]]])
        for _ in range(4):
            txn = Transaction(pruned.store)
            pruner.step(pruned.store, txn, now, rows_max=3)
            pruned.store.commit(txn)
        assert state_hash(pruned.store, now, pruned.rules) == state_hash(kept.store, now, kept.rules)
        for space in (0, 7):
            means = [w.aggregate.mean(w.store, ["u", "ü"], space, now) for w in (kept, pruned)]
            assert means[0].mean.tolist() == means[1].mean.tolist()


def test_late_arrivals_never_overwrite() -> None:
    times = [logs.BASE + 3, logs.BASE + 2, logs.BASE + 1]
    together, apart = Worker(), Worker()
    counts, _ = together.fold([message(ts, ["a"]) for ts in times])
    for ts in times:
        apart.fold([message(ts, ["a"])])
    assert counts == FoldCounts(accepted=1, late=2)
    for worker in (together, apart):
        assert worker.cache.read(worker.store, "u", 7).as_of.tolist() == [times[0]]


def test_an_item_twice_in_one_message_counts_once() -> None:
    worker = Worker()
    counts, taken = worker.fold([message(logs.BASE, ["a", "b", "a"])])
    assert (counts, taken) == (FoldCounts(accepted=2, duplicate=1), [True, True, False])


@pytest.mark.parametrize(
    ("ttl_ms", "age_ms", "fresh"), [(2000, 1999, True), (2000, 2000, False), (2000, 2001, False), (0, 0, False)]
)
def test_ttl_at_its_edges(ttl_ms: int, age_ms: int, fresh: bool) -> None:
    as_of = np.array([logs.BASE], np.int64)
    assert Cache(ttl_ms, 3).fresh(as_of, logs.BASE + age_ms).tolist() == [fresh]


def test_rows_outlive_a_short_ttl_and_go_with_a_long_one() -> None:
    for ttl_ms, kept_ms in ((1000, DAY_MS), (3 * DAY_MS, 3 * DAY_MS)):
        rule = Worker(ttl_ms).rules["pairs"]
        worker = Worker(ttl_ms)
        worker.fold([message(logs.BASE, ["a"])])
        ((key, value),) = worker.store.rows("pairs")
        assert not rule.dead(key, value, logs.BASE + kept_ms - 1)
        assert rule.dead(key, value, logs.BASE + kept_ms)


def test_find_is_by_item() -> None:
    worker = Worker()
    worker.fold([message(logs.BASE, ["b", "a", "ü"])])
    rows = worker.cache.read(worker.store, "u", 7)
    assert [rows.items[place] if place >= 0 else None for place in rows.find(["ü", "x", "a", "a"])] == [
        "ü",
        None,
        "a",
        "a",
    ]


def test_the_mean_s_window_at_its_edges() -> None:
    worker, now = Worker(), logs.BASE + DAY_MS
    worker.fold([message(now - DAY_MS, ["a"], code=1), message(now - DAY_MS + PANE_MS, ["b"], code=3)])
    counted = [worker.aggregate.mean(worker.store, ["u"], 7, now + at).count[0] for at in (-1, 0, PANE_MS - 1, PANE_MS)]
    assert counted == [2, 1, 1, 0]


def test_the_newest_of_a_pane_is_the_newest_in_any_order() -> None:
    worker = Worker()
    for as_of, item in ((5, "a"), (9, "b"), (7, "c")):
        worker.fold([message(logs.BASE + as_of, [item])])
    assert worker.aggregate.mean(worker.store, ["u"], 7, logs.BASE).newest_ms.tolist() == [logs.BASE + 9]


def test_spaces_do_not_mix_and_another_dimension_is_an_error() -> None:
    worker = Worker()
    wide = dataclasses.replace(message(logs.BASE, ["a"]), codes=np.ones((1, 5), np.int8))
    worker.fold([message(logs.BASE, ["a"]), dataclasses.replace(wide, space=8)])
    assert worker.cache.read(worker.store, "u", 7).items == ["a"]
    assert worker.cache.read(worker.store, "u", 9).items == []
    with pytest.raises(StateError, match="5 numbers, the ranker reads 3"):
        worker.cache.read(worker.store, "u", 8)
    with pytest.raises(StateError, match="5 numbers, the ranker reads 3"):
        worker.aggregate.mean(worker.store, ["u"], 8, logs.BASE)
    with pytest.raises(BadRecord, match=r"sums of 3 and 5 numbers|sums of 5 and 3 numbers") as caught:
        worker.fold([dataclasses.replace(wide, as_of=logs.BASE + 1)])
    assert caught.value.reason == "vector"


def test_numbers_out_of_range_are_cut_and_can_not_overflow() -> None:
    worker = Worker()
    for i in range(3):
        worker.fold([message(logs.BASE + i, ["a"], scale=3e38, code=-127)])
    means = worker.aggregate.mean(worker.store, ["u"], 7, logs.BASE)
    assert means.mean.tolist() == [[-VALUE_MAX / FIXED_POINT] * 3]


def test_nothing_in_nothing_out() -> None:
    worker = Worker()
    assert worker.fold([]) == (FoldCounts(), [])
    means = worker.aggregate.mean(worker.store, [], 7, logs.BASE)
    assert means.mean.shape == (0, logs.DIMENSIONS)
    assert worker.cache.read_many(worker.store, [], 7) == []

"""Histories and counters: a function of the log alone, equal to the dumb oracle, whatever the batches, drops and evictions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streams.counters import COUNT_MAX, ItemCounters, Rings
from streams.history import History
from streams.items import ItemIndex
from streams.state.memory import MemoryStore
from streams.state.prune import Pruner, Rules, state_hash
from streams.state.store import FoldCounts, Transaction
from tests.oracles import folds as oracle
from tests.oracles.folds import HOUR_MS, LoggedEvent
from tests.streams import logs

ROWS_MAX = 5
TABLES = ("history", "shown", "item_counters", "user_counters")


class Worker:
    """The folds of events over one store, as serve holds them."""

    def __init__(self, items_max: int = 1000) -> None:
        self.store = MemoryStore()
        self.items = ItemIndex(items_max)
        self.history = History("history", ROWS_MAX, impressions=False)
        self.shown = History("shown", ROWS_MAX, impressions=True)
        self.counters = ItemCounters(self.items)

    @property
    def rules(self) -> Rules:
        return {**self.history.rules(), **self.shown.rules(), **self.counters.rules()}

    def fold(self, log: list[LoggedEvent], piece: slice = slice(None), commit: bool = True) -> FoldCounts:
        batch, txn = logs.event_batch(log, piece), Transaction(self.store)
        for history in (self.history, self.shown):
            history.fold(batch, txn)
        counts = self.counters.fold(batch, txn)
        if commit:
            self.store.commit(txn)
        return counts

    def rows(self) -> dict[str, list[tuple[bytes, bytes]]]:
        return {table: list(self.store.rows(table)) for table in TABLES}


@logs.quick
@given(logs.events, logs.cuts, st.sampled_from([2, 4, 1000]))
def test_the_cut_of_the_batches_does_not_show(log: list[LoggedEvent], cuts: set[int], items_max: int) -> None:
    whole, cut = Worker(), Worker(items_max)
    whole.fold(log)
    for piece in logs.pieces(len(log), cuts):
        cut.fold(log, piece)
    assert cut.rows() == whole.rows()


@logs.quick
@given(logs.events, logs.cuts, st.lists(st.booleans(), min_size=8, max_size=8))
def test_a_dropped_transaction_leaves_no_trace(log: list[LoggedEvent], cuts: set[int], fails: list[bool]) -> None:
    whole, failing = Worker(), Worker()
    whole.fold(log)
    for piece, fail in zip(logs.pieces(len(log), cuts), fails, strict=False):
        if fail:
            failing.fold(log, piece, commit=False)
        failing.fold(log, piece)
    assert failing.rows() == whole.rows()


@logs.quick
@given(logs.events, st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_show_in_counters(log: list[LoggedEvent], random: object) -> None:
    straight, shuffled = Worker(), Worker()
    straight.fold(log)
    mixed = list(log)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    shuffled.fold(mixed)
    for table in ("item_counters", "user_counters"):
        assert list(shuffled.store.rows(table)) == list(straight.store.rows(table))


@logs.quick
@given(logs.events, logs.cuts)
def test_histories_are_the_newest_by_time_and_offset(log: list[LoggedEvent], cuts: set[int]) -> None:
    worker = Worker()
    for piece in logs.pieces(len(log), cuts):
        worker.fold(log, piece)
    users = sorted({event.user for event in log} | {"stranger"})
    for history, impressions in ((worker.history, False), (worker.shown, True)):
        for user, row in zip(users, history.read(worker.store, users), strict=True):
            entries = list(zip(row.ts.tolist(), row.offsets.tolist(), row.types.tolist(), row.items, strict=True))
            assert entries == oracle.history(log, user, ROWS_MAX, impressions)


@logs.quick
@given(logs.events, logs.cuts, st.integers(0, 50 * HOUR_MS))
def test_counts_are_those_of_the_window(log: list[LoggedEvent], cuts: set[int], later: int) -> None:
    worker = Worker()
    for piece in logs.pieces(len(log), cuts):
        worker.fold(log, piece)
    now = max([event.ts for event in log], default=logs.BASE) + later
    items, users = sorted({event.item for event in log} | {"new"}), sorted({event.user for event in log} | {"new"})
    found = worker.counters.read(worker.store, worker.items.intern(items), now)
    assert found.tolist() == [list(oracle.item_counts(log, item, now)) for item in items]
    found = worker.counters.read_users(worker.store, users, now)
    assert found.tolist() == [list(oracle.user_counts(log, user, now)) for user in users]


@logs.quick
@given(logs.events, logs.cuts)
def test_pruning_shows_neither_in_answers_nor_in_the_hash(log: list[LoggedEvent], cuts: set[int]) -> None:
    kept, pruned = Worker(), Worker()
    pruner, now = Pruner(pruned.rules), 0
    for piece in logs.pieces(len(log), cuts):
        kept.fold(log, piece)
        pruned.fold(log, piece)
        now = max([now, *[event.ts for event in log[piece]]])
        for _ in range(4):
            txn = Transaction(pruned.store)
            pruner.step(pruned.store, txn, now, rows_max=3)
            pruned.store.commit(txn)
        pruned.counters = ItemCounters(pruned.items)  # as after a restart: no hot copy to hide behind
        assert state_hash(pruned.store, now, pruned.rules) == state_hash(kept.store, now, kept.rules)
        rows = [worker.items.intern(["a", "b", "e"]) for worker in (pruned, kept)]
        assert (
            pruned.counters.read(pruned.store, rows[0], now).tolist()
            == kept.counters.read(kept.store, rows[1], now).tolist()
        )


def test_pruning_keeps_what_a_late_event_would_build_on() -> None:
    hashes = []
    for prune in (False, True):
        worker, now = Worker(), logs.BASE + 25 * HOUR_MS
        worker.fold([LoggedEvent("u", "a", 1, logs.BASE), LoggedEvent("v", "b", 1, now)])
        txn, pruner = Transaction(worker.store), Pruner(worker.rules)
        for _ in range(4 * prune):
            pruner.step(worker.store, txn, now)
        worker.store.commit(txn)
        worker.counters = ItemCounters(worker.items)
        worker.fold([LoggedEvent("u", "a", 1, now - 5 * HOUR_MS)])  # late, in the window, and a day from the first
        hashes.append(state_hash(worker.store, now, worker.rules))
    assert hashes[0] == hashes[1]


def test_pruning_does_remove_what_is_dead() -> None:
    worker = Worker()
    worker.fold([LoggedEvent("u", "a", 1, logs.BASE), LoggedEvent("v", "b", 1, logs.BASE + 40 * HOUR_MS)])
    pruner = Pruner(worker.rules)
    removed = 0
    for _ in range(4):
        txn = Transaction(worker.store)
        removed += pruner.step(worker.store, txn, logs.BASE + 48 * HOUR_MS)
        worker.store.commit(txn)
    assert removed == 2
    assert [len(worker.rows()[table]) for table in TABLES] == [0, 2, 1, 1]


def test_a_full_history_drops_its_oldest_batch_after_batch() -> None:
    worker = Worker()
    log = [LoggedEvent("u", "item" * (i % 3 + 1) + str(i), 3, logs.BASE + i) for i in range(4 * ROWS_MAX)]
    for start in range(0, len(log), 2):
        worker.fold(log, slice(start, start + 2))
    (row,) = worker.history.read(worker.store, ["u"])
    assert row.items == [event.item for event in log[-ROWS_MAX:]]
    assert row.offsets.tolist() == list(range(3 * ROWS_MAX, 4 * ROWS_MAX))


def test_the_window_at_its_edges() -> None:
    worker, now = Worker(), logs.BASE + 24 * HOUR_MS
    worker.fold([LoggedEvent("u", "a", 1, ts) for ts in (now - 24 * HOUR_MS, now - 23 * HOUR_MS, now)])
    row = worker.items.intern(["a"])
    counted = {at: worker.counters.read(worker.store, row, now + at)[0, 0] for at in (-1, 0, HOUR_MS - 1, HOUR_MS)}
    # At -1 the event of `now` is not yet; of the two before, the first was pushed out of the row by it.
    assert counted == {-1: 1, 0: 2, HOUR_MS - 1: 2, HOUR_MS: 1}


def test_shuffled_old_events_count_by_their_own_time() -> None:
    worker, now = Worker(), logs.BASE + 100 * HOUR_MS + 1234
    worker.fold([LoggedEvent("u", "a", 3, now - hours * HOUR_MS) for hours in (23, 1, 25)])
    assert worker.counters.read_users(worker.store, ["u"], now).tolist() == [[2, 2]]


def test_late_events_are_counted() -> None:
    worker = Worker()
    counts = worker.fold([LoggedEvent("u", "a", 1, logs.BASE + hour * HOUR_MS) for hour in (30, 7, 6)])
    assert counts == FoldCounts(accepted=2, late=1)
    many = logs.event_batch([LoggedEvent("v", "a", 3, logs.BASE + i) for i in range(ROWS_MAX + 2)])
    assert worker.history.fold(many, Transaction(worker.store)) == FoldCounts(accepted=ROWS_MAX, late=2)


def test_a_pane_saturates() -> None:
    rings, rows, yes = Rings(1), np.zeros(3, np.int64), np.ones(3, np.bool_)
    rings.load(rows[:1], [np.array([5, COUNT_MAX - 2, 0], "<u4").tobytes()])
    rings.add(rows, np.full(3, 5, np.int32), yes, yes)
    assert np.frombuffer(rings.encode(rows[:1])[0], "<u4").tolist() == [5, COUNT_MAX, 3]


def test_reads_inside_and_outside_of_an_open_transaction() -> None:
    worker = Worker()
    worker.fold([LoggedEvent("u", "a", 1, logs.BASE)])
    row = worker.items.intern(["a"])
    txn = Transaction(worker.store)
    worker.counters.fold(logs.event_batch([LoggedEvent("u", "a", 1, logs.BASE)]), txn)
    seen = [
        int(worker.counters.read(reader, row, logs.BASE)[0, 0]) for reader in (txn, worker.store, txn, worker.store)
    ]
    worker.store.commit(txn)
    seen.append(int(worker.counters.read(worker.store, row, logs.BASE)[0, 0]))
    assert seen == [2, 1, 2, 1, 2]


def test_two_counters_share_an_index() -> None:
    one, other = Worker(items_max=2), Worker()
    other.items, other.counters = one.items, ItemCounters(one.items)
    for worker, item in ((one, "a"), (other, "b"), (one, "c"), (other, "d"), (one, "a"), (other, "b")):
        worker.fold([LoggedEvent("u", item, 1, logs.BASE)])
    counts = [w.counters.read(w.store, w.items.intern(["a", "b"]), logs.BASE)[:, 0].tolist() for w in (one, other)]
    assert counts == [[2, 0], [0, 2]]
    assert one.items.swept > 0

"""The pair table against a dictionary; the ledger's fresh and in flight at their limits, its log, its bounds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.ledger import Ledger
from streams.pairs import PairTable, mix64, pair_keys
from streams.state.memory import MemoryStore
from streams.state.store import Transaction

TTL, REFRESH, INFLIGHT, NOW = 1_000, 100, 50, 1_700_000_000_000


def keys(*names: int) -> np.ndarray:
    return mix64(np.array(names, np.uint64))


@given(st.lists(st.lists(st.integers(0, 400), max_size=60), max_size=60))
@settings(max_examples=60, deadline=None)
def test_table_is_a_dictionary(batches: list[list[int]]) -> None:
    table, oracle = PairTable("t", 100_000, {"n": "<i8"}), dict[int, int]()
    for now, batch in enumerate(batches):
        rows = table.rows(keys(*batch), now)
        np.add.at(table.columns["n"], rows, 1)
        for name in batch:
            oracle[name] = oracle.get(name, 0) + 1
    asked = list(range(402))
    rows = table.find(keys(*asked))
    found = np.where(rows >= 0, table.columns["n"][rows], 0).tolist()
    assert found == [oracle.get(name, 0) for name in asked]
    assert len(table) == len(oracle)


def test_table_grows_without_losing_or_repeating_a_row() -> None:
    table = PairTable("t", 100_000, {"n": "<i8"})
    for start in range(0, 50_000, 700):
        names = keys(*range(start, start + 700))
        rows = table.rows(names, start)
        table.columns["n"][rows] = np.arange(start, start + 700)
    everything = keys(*range(50_400))
    assert (table.columns["n"][table.find(everything)] == np.arange(50_400)).all()
    assert (np.sort(table._index[table._index >= 0]) == np.arange(len(table))).all()  # each row once: chains stay short


def test_a_full_table_forgets_the_least_recently_used() -> None:
    table = PairTable("t", 100, {"n": "<i8"})
    table.rows(keys(*range(100)), 1)
    table.rows(keys(*range(50)), 2)
    table.rows(keys(*range(1_000, 1_020)), 3)
    assert len(table) <= 100
    assert table.evicted >= 20
    assert (table.find(keys(*range(50))) >= 0).all()
    assert (table.find(keys(*range(1_000, 1_020))) >= 0).all()
    assert (table.find(keys(*range(50, 100))) < 0).sum() >= 25


def test_more_new_keys_than_a_table_holds() -> None:
    table = PairTable("t", 10, {"n": "<i8"})
    rows = table.rows(keys(*range(25)), 1)
    assert sorted(rows[rows >= 0].tolist()) == list(range(10))


def test_pair_keys_take_order_and_never_meet_by_accident() -> None:
    ids = np.arange(300, dtype=np.uint64)
    grid = pair_keys(ids[:, None], ids[None, :])
    assert len(np.unique(grid)) == 300 * 300


def ledger(rows_max: int = 1_000) -> Ledger:
    return Ledger(rows_max, TTL, REFRESH, INFLIGHT)


def test_in_flight_until_deadline_and_grace_have_passed() -> None:
    one = ledger()
    one.issue(keys(1), NOW)
    for now, expected in ((NOW, True), (NOW + INFLIGHT - 1, True), (NOW + INFLIGHT, False)):
        fresh, in_flight = one.states(keys(1, 2), now)
        assert in_flight.tolist() == [expected, False]
        assert not fresh.any()


def test_fresh_until_it_nears_its_expiry() -> None:
    one = ledger()
    one.issue(keys(1), NOW)
    one.embedded(keys(1), np.array([NOW]))
    for now, expected in ((NOW, True), (NOW + TTL - REFRESH - 1, True), (NOW + TTL - REFRESH, False)):
        fresh, in_flight = one.states(keys(1), now)
        assert fresh.tolist() == [expected]
        assert not in_flight.any()


def test_the_newest_embedding_counts_and_an_old_one_does_not_answer_a_newer_request() -> None:
    one = ledger()
    one.issue(keys(1), NOW)
    one.embedded(keys(1, 1, 1), np.array([NOW - 300, NOW - 200, NOW - 400]))
    assert one.states(keys(1), NOW)[1].all()
    assert one.states(keys(1), NOW - 200 + TTL - REFRESH - 1)[0].all()
    assert not one.states(keys(1), NOW - 200 + TTL - REFRESH)[0].any()


def test_reopened_it_knows_what_it_knew_and_a_smaller_one_nothing() -> None:
    store, one = MemoryStore(), ledger()
    one.issue(keys(1, 2), NOW)
    one.embedded(keys(1, 3), np.array([NOW, NOW - 5]))
    txn = Transaction(store)
    one.save(txn)
    store.commit(txn)
    again, smaller = ledger(), ledger(rows_max=2)
    assert again.load(store, len(one))
    assert not smaller.load(store, len(one))
    for now in (NOW, NOW + INFLIGHT, NOW + TTL - REFRESH - 2):
        for mine, theirs in zip(one.states(keys(1, 2, 3), now), again.states(keys(1, 2, 3), now), strict=True):
            assert mine.tolist() == theirs.tolist()
    assert not np.any(smaller.states(keys(1, 2, 3), NOW))


def test_what_it_keeps_is_bounded() -> None:
    store, one = MemoryStore(), ledger(rows_max=40)
    for step in range(600):
        one.issue(keys(*range(step * 10, step * 10 + 10)), NOW + step)
        txn = Transaction(store)
        one.save(txn)
        store.commit(txn)
    assert len(one) <= 40
    assert sum(len(value) for _, value in store.rows("soft")) < (2 * 40 + 4_096 + 10) * 36 + 600 * 8
    again = ledger(rows_max=40)
    assert again.load(store, len(one))
    for mine, theirs in zip(
        one.states(keys(*range(6_000)), NOW + 600), again.states(keys(*range(6_000)), NOW + 600), strict=True
    ):
        assert (mine == theirs).all()

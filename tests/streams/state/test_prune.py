"""Pruning in rounds over one snapshot: bounded steps, and nothing that was renewed since is taken."""

from streams.state.memory import MemoryStore
from streams.state.prune import Pruner, Rule
from streams.state.store import Transaction

TABLE = "soft"
RULES = {TABLE: Rule(lambda _key, value: int.from_bytes(value, "big"), 10, 10)}


def put(store: MemoryStore, rows: dict[bytes, int]) -> None:
    txn = Transaction(store)
    for key, ts in rows.items():
        txn.put(TABLE, key, ts.to_bytes(8, "big"))
    store.commit(txn)


def step(pruner: Pruner, store: MemoryStore, now: int, rows_max: int) -> int:
    txn = Transaction(store)
    deleted = pruner.step(store, txn, now, rows_max)
    store.commit(txn)
    return deleted


def test_a_round_takes_every_dead_row_in_bounded_steps() -> None:
    store = MemoryStore()
    put(store, {bytes([0, 1, n]): 5 if n % 2 else 100 for n in range(20)})
    pruner = Pruner(RULES)
    assert [step(pruner, store, 100, 8) for _ in range(3)] == [4, 4, 2]
    assert len(list(store.rows(TABLE))) == 10


def test_a_row_that_was_renewed_since_the_round_began_stays() -> None:
    store = MemoryStore()
    put(store, {b"\x00\x01a": 5, b"\x00\x01b": 5, b"\x00\x01c": 5})
    pruner = Pruner(RULES)
    assert step(pruner, store, 100, 1) == 1
    put(store, {b"\x00\x01b": 99})
    assert step(pruner, store, 100, 2) == 1
    assert [key for key, _ in store.rows(TABLE)] == [b"\x00\x01b"]


def test_rows_that_come_during_a_round_are_seen_by_the_next() -> None:
    store = MemoryStore()
    put(store, {b"\x00\x01a": 99})
    pruner = Pruner(RULES)
    step(pruner, store, 100, 1)
    put(store, {b"\x00\x01z": 5})
    assert step(pruner, store, 100, 1) == 0
    assert step(pruner, store, 100, 1) + step(pruner, store, 100, 1) == 1

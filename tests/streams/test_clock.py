"""A partition's clock never goes back, and survives a restart with the rows."""

from __future__ import annotations

import numpy as np

from streams.clock import PartitionClock
from streams.state.memory import MemoryStore
from streams.state.store import Transaction


def test_it_is_the_largest_time_seen() -> None:
    clock = PartitionClock()
    assert [clock.advance(np.array(ts, np.int64)) for ts in ([], [5, 9, 7], [3], [], [10])] == [0, 9, 9, 9, 10]


def test_it_is_kept_with_the_rows() -> None:
    store, clock = MemoryStore(), PartitionClock()
    assert PartitionClock.load(store).now == 0
    clock.advance(np.array([1_700_000_000_000], np.int64))
    txn = Transaction(store)
    clock.save(txn)
    store.commit(txn)
    assert PartitionClock.load(store).now == 1_700_000_000_000

"""Items that the same users touch one after another: per item a bounded list of neighbours, learned online.

In: pairs (item, other item) with their times. Out: per item its neighbours and each one's share of what followed it. Never:
grows past `neighbors_max` an item, nor past the item table.

The lists are decayed counts with eviction of the lightest: a newcomer takes the lightest place with its own weight, so the last
place is on probation, and whoever comes again within its stay climbs. Weights are forward decayed (see `streams.sources`).
"""

from __future__ import annotations

import numpy as np

from streams.sources import F32, I32, I64, Index
from streams.state.column_log import Changed, ColumnLog
from streams.state.store import Store, Transaction

_TAU_MS = 7 * 24 * 3_600_000.0
_EXPONENT_MAX = 30.0


class Covisits:
    """Neighbours by slot: `neighbors` int32 [slots, neighbors_max] (-1 = empty) with `weights` float32."""

    def __init__(self, neighbors_max: int) -> None:
        self.neighbors_max = neighbors_max
        self.neighbors = np.full((0, neighbors_max), -1, np.int32)
        self.weights = np.zeros((0, neighbors_max), np.float32)
        self.totals = np.zeros(0, np.float32)
        self.epoch = 0
        self._changed = Changed()
        each = (neighbors_max,)
        self._log = ColumnLog("covisits", [("neighbors", "<i4", each), ("weights", "<f4", each), ("totals", "<f4")])

    def learn(self, item: Index, other: Index, ts: I64, amount: F32 | float = 1.0) -> None:
        """`other[i]` was touched near `item[i]` at `ts[i]`."""
        distinct = item != other
        if not distinct.any():
            return
        weight = (amount * self._growth(ts))[distinct]
        keys = item[distinct].astype(np.int64) << 32 | other[distinct]
        self._reserve(int(max(item.max(), other.max())) + 1)
        keys, at = np.unique(keys, return_inverse=True)
        total = np.bincount(at, weight, len(keys)).astype(np.float32)
        left, right = (keys >> 32).astype(np.int32), (keys & 0xFFFFFFFF).astype(np.int32)
        self._changed.add(left)
        np.add.at(self.totals, left, total)
        first = np.flatnonzero(np.append(True, left[1:] != left[:-1]))
        place = np.arange(len(left)) - np.repeat(first, np.diff(np.append(first, len(left))))
        for turn in range(int(place.max()) + 1):  # one neighbour of each item a turn
            now = place == turn
            self._enter(left[now], right[now], total[now])

    def read(self, slots: Index) -> tuple[I32, F32]:
        """Neighbours int32 [n, neighbors_max] (-1 = none) and their shares float32 of each slot's total."""
        known = slots < len(self.totals)
        at = np.where(known, slots, 0)
        if not len(self.totals):
            empty = np.full((len(slots), self.neighbors_max), -1, np.int32)
            return empty, np.zeros(empty.shape, np.float32)
        neighbors = np.where(known[:, None], self.neighbors[at], np.int32(-1))
        totals = np.maximum(self.totals[at], np.float32(1e-30))[:, None]
        return neighbors, np.divide(self.weights[at], totals, dtype=np.float32)

    def remap(self, moved: I32) -> None:
        """Follow the item table's sweep: `moved` is old slot → new slot, -1 where it is gone."""
        old = np.flatnonzero(moved[: len(self.totals)] >= 0)
        neighbors = self.neighbors[old]
        gone = (neighbors < 0) | (moved[np.maximum(neighbors, 0)] < 0)
        self.neighbors = np.where(gone, -1, moved[np.maximum(neighbors, 0)])
        self.weights = np.where(gone, np.float32(0), self.weights[old])
        self.totals = self.totals[old]
        self._changed.everything()

    def save(self, txn: Transaction) -> None:
        """Write the lists that changed."""
        columns = {"neighbors": self.neighbors, "weights": self.weights, "totals": self.totals}
        self._log.save(self._changed, 0, len(self.totals), columns, txn)

    def load(self, store: Store, size: int | None, epoch: int) -> bool:
        """Take `size` saved lists; False where they are of another length."""
        table = self._log.load(store, size)
        if table is None:
            self._changed.everything()
            return False
        self.weights, self.totals, self.epoch = table["weights"].copy(), table["totals"].copy(), epoch
        written = self.totals[:, None] > 0
        self.neighbors = np.where(written, table["neighbors"], np.int32(-1))
        return True

    def _growth(self, ts: I64) -> F32:
        newest = int(ts.max())
        if (newest - self.epoch) / _TAU_MS > _EXPONENT_MAX:
            decay = np.float32(np.exp(-min(80.0, (newest - self.epoch) / _TAU_MS)))
            self.weights *= decay
            self.totals *= decay
            self._changed.everything()
            self.epoch = newest
        return np.exp(np.maximum((ts - self.epoch) / _TAU_MS, -80.0)).astype(np.float32)

    def _enter(self, left: I32, right: I32, weight: F32) -> None:
        """Add one neighbour to each of these (distinct) items."""
        there = self.neighbors[left] == right[:, None]
        known = there.any(axis=1)
        column = np.where(known, there.argmax(axis=1), self.weights[left].argmin(axis=1))
        before = np.where(known, self.weights[left, column], np.float32(0))
        self.neighbors[left, column] = right
        self.weights[left, column] = before + weight

    def _reserve(self, rows: int) -> None:
        old = len(self.totals)
        if rows <= old:
            return
        more = max(rows, 2 * old, 1024) - old
        self.neighbors = np.concatenate((self.neighbors, np.full((more, self.neighbors_max), -1, np.int32)))
        self.weights = np.concatenate((self.weights, np.zeros((more, self.neighbors_max), np.float32)))
        self.totals = np.concatenate((self.totals, np.zeros(more, np.float32)))

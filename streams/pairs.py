"""A bounded table of numbers by 64-bit key: what speculation remembers of millions of pairs, read and written in bulk.

In: keys uint64 [n] (already well mixed, see `pair_keys`). Out: rows int64 [n] into the table's columns, -1 where there is none.
Never: grows past `rows_max`; when full it forgets the least recently used quarter in one sweep. Rows are valid until the next
`rows`.

Keys are hashes: two pairs in 2^64 may share one. With a million rows that befalls one pair in 10^13, and costs an FM call at
most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from streams.state.column_log import Changed, ColumnLog
from streams.state.store import Store, Transaction

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_KEEP_SHARE = 0.75
_ROWS_MIN = 1024
_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix64(values: U64) -> U64:
    """SplitMix64's finaliser over each number: every input bit moves about half of the output bits."""
    x = values + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    mixed: U64 = x ^ (x >> np.uint64(31))
    return mixed


def pair_keys(user_hashes: U64, item_hashes: U64) -> U64:
    """One key a pair from `hash64` of its user and of its item (arrays that broadcast); order matters."""
    return mix64(mix64(user_hashes) ^ item_hashes)


class PairTable:
    """Open addressing over dense columns; `columns[name]` is indexed by the rows that `find` and `rows` return.

    `save` and `load` keep it in the store as `name`. Of a row that `rows` returned the columns count as changed.
    """

    def __init__(self, name: str, rows_max: int, columns: Mapping[str, str]) -> None:
        assert rows_max > 0, f"rows_max is {rows_max}; a table holds at least one row"
        self.rows_max = rows_max
        self._changed = Changed()
        self._log = ColumnLog(name, [("key", "<u8"), ("used", "<i8"), *columns.items()])
        self.size = 0
        self.evicted = 0
        self.keys = np.zeros(0, np.uint64)
        self.columns: dict[str, npt.NDArray[Any]] = {name: np.zeros(0, dtype) for name, dtype in columns.items()}
        self._used = np.zeros(0, np.int64)
        self._reserve(min(rows_max, _ROWS_MIN))

    def __len__(self) -> int:
        return self.size

    def find(self, keys: U64) -> I64:
        """The row of each key, -1 where it has none."""
        mask = np.uint64(len(self._index) - 1)
        found = np.full(len(keys), -1, np.int64)
        active, sought, at = np.arange(len(keys)), keys, (keys & mask).astype(np.int64)
        while len(active):
            rows = self._index[at]
            taken = rows >= 0
            hit = taken & (self.keys[rows] == sought)
            found[active[hit]] = rows[hit]
            on = taken & ~hit
            active, sought, at = active[on], sought[on], (at[on] + 1) & int(mask)
        return found

    def rows(self, keys: U64, now: int) -> I64:
        """The row of each key, made (all columns zero) where there is none, and marked as used at `now`.

        Of more new keys than `rows_max` in one call the first are kept, the rest get -1.
        """
        found = self.find(keys)
        if (missing := found < 0).any():
            new = keys[missing]
            _, first = np.unique(new, return_index=True)
            new = new[np.sort(first)]
            if self.size + len(new) > self.rows_max:
                self._used[found[~missing]] = now
                self._sweep(len(new))
            self._append(new[: self.rows_max - self.size])
            found = self.find(keys)
        kept = found[found >= 0]
        self._used[kept] = now
        self._changed.add(kept)
        return found

    def save(self, txn: Transaction) -> None:
        """Write what changed."""
        self._log.save(self._changed, 0, self.size, self.columns | {"key": self.keys, "used": self._used}, txn)

    def load(self, store: Store, size: int | None) -> bool:
        """Take the `size` rows that were saved (None: leave them); False where the table holds fewer, or other columns."""
        table = self._log.load(store, size)
        if table is None or size is None or size > self.rows_max:
            self._changed.everything()
            return False
        self.size = 0
        self._reserve(max(size, min(self.rows_max, _ROWS_MIN)))
        self.size = size
        self.keys[:size], self._used[:size] = table["key"], table["used"]
        for name, column in self.columns.items():
            column[:size] = table[name]
        self._rebuild()
        return True

    def _append(self, new: U64) -> None:
        end = self.size + len(new)
        if end > len(self.keys):
            self._reserve(min(self.rows_max, max(end, 2 * len(self.keys))))
        rows = np.arange(self.size, end)
        self.size = end
        self.keys[rows] = new
        for column in self.columns.values():
            column[rows] = 0
        self._place(rows)

    def _place(self, rows: I64) -> None:
        """Enter rows into the index: all try their place at once, who loses a race goes one further."""
        mask = len(self._index) - 1
        at = (self.keys[rows] & np.uint64(mask)).astype(np.int64)
        while len(rows):
            free = self._index[at] < 0
            self._index[at[free]] = rows[free]
            on = self._index[at] != rows
            rows, at = rows[on], (at[on] + 1) & mask

    def _sweep(self, wanted: int) -> None:
        """Keep the most recently used rows, at most three quarters, so that `wanted` new ones fit."""
        keep = max(0, min(int(self.rows_max * _KEEP_SHARE), self.rows_max - wanted))
        order = np.lexsort((np.arange(self.size), self._used[: self.size]))
        kept = np.sort(order[self.size - min(keep, self.size) :])
        self.evicted += self.size - len(kept)
        self.size = len(kept)
        for values in (self.keys, self._used, *self.columns.values()):
            values[: self.size] = values[kept]
        self._changed.everything()
        self._rebuild()

    def _reserve(self, rows: int) -> None:
        def grown(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate((values, np.zeros(rows - len(values), values.dtype)))

        self.keys, self._used = grown(self.keys), grown(self._used)
        self.columns = {name: grown(values) for name, values in self.columns.items()}
        self._rebuild()

    def _rebuild(self) -> None:
        """A fresh index, at most half full."""
        self._index = np.full(1 << (2 * len(self.keys) - 1).bit_length(), -1, np.int32)
        self._place(np.arange(self.size))

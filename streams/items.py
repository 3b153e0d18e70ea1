"""Items as dense row numbers, with the columns that features and models read by row. A cache, never state.

In: item ids as they come, and the catalogue. Out: int32 rows, and arrays indexed by them. Never: decides anything; an item that was
dropped here is only looked up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.events import Item
from schemas.keys import hash64

CATEGORY_UNKNOWN = 0
"""Category bucket of an item that the catalogue doesn't know; known categories hash into 1 and up."""

_KEEP_SHARE = 0.75
"""Share of `items_max` that a sweep leaves, so that sweeps are rare."""


@dataclass(frozen=True)
class ItemsConfig:
    """What one process knows of items."""

    items_max: int = 1_000_000
    """Items of the catalogue and of what users do, together; past it the longest unused are dropped, and those without a catalogue
    entry first. About 200 bytes each, and the content's."""

    def __post_init__(self) -> None:
        if self.items_max < 1:
            raise ValueError(f"items_max is {self.items_max}; it must be 1 or more")


class ItemIndex:
    """Id → row, and by row: `names`, `bucket` int32, `category` int32, `content` float32 [*, c], `serial` int64.

    A row stays an item's until a sweep drops it, and only then goes to another item, with a new `serial`: whoever keeps numbers
    by row compares serials. A sweep takes the least recently used, those without a catalogue entry first, and leaves 3/4 of
    `items_max`: rows just handed out are safe for the batch, so don't keep rows from batch to batch.
    The arrays are replaced when they grow: read them anew through the index.
    """

    def __init__(
        self,
        items_max: int = 1_000_000,
        item_buckets: int = 1 << 17,
        category_buckets: int = 1 << 10,
        content_dims: int = 0,
    ) -> None:
        self.items_max, self.item_buckets, self.category_buckets = items_max, item_buckets, category_buckets
        self.names: list[str] = []
        self.swept = 0
        """Rows dropped so far; `catalogued_swept` of them had a catalogue entry, which is gone until the item is sent again."""
        self.catalogued_swept = 0
        self.content_refused = 0
        """Catalogue items whose content had another length than `content_dims`; it was taken as missing."""
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._tick = 0
        self._serials = 0
        self.bucket = np.zeros(0, np.int32)
        self.category = np.zeros(0, np.int32)
        self.content = np.zeros((0, content_dims), np.float32)
        self.serial = np.zeros(0, np.int64)
        self._used = np.zeros(0, np.int64)
        self._catalogued = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return len(self._rows)

    def intern(self, names: Sequence[str]) -> npt.NDArray[np.int32]:
        """The row of each id, int32 [n]; unknown ids get one. Valid for the batch (see the class)."""
        try:
            rows = np.fromiter(map(self._rows.__getitem__, names), np.int32, len(names))
        except KeyError:
            rows = self._intern_new(names)
        self._tick += 1
        self._used[rows] = self._tick
        return rows

    def update(self, items: Sequence[tuple[str, Item | None]]) -> None:
        """Apply catalogue records in order; None withdraws an item's entry. The item keeps its row."""
        for row, (_, item) in zip(self.intern([name for name, _ in items]).tolist(), items, strict=True):
            self._forget_entry(row)
            if item is None:
                continue
            self._catalogued[row] = True
            if item.category is not None:
                self.category[row] = 1 + hash64(str(item.category)) % (self.category_buckets - 1)
            if item.content is not None and len(item.content) == self.content.shape[1]:
                self.content[row] = item.content
            elif item.content is not None:
                self.content_refused += 1

    def _intern_new(self, names: Sequence[str]) -> npt.NDArray[np.int32]:
        new = [name for name in dict.fromkeys(names) if name not in self._rows]
        if len(self._rows) + len(new) > self.items_max:
            known = [row for name in names if (row := self._rows.get(name)) is not None]
            self._used[known] = self._tick + 1  # what is being asked for stays
            self._sweep(int(self.items_max * _KEEP_SHARE) - len(new))
        self._reserve(len(new))
        for name in new:
            row = self._free.pop()
            self._rows[name] = row
            self.names[row] = name
            self._serials += 1
            self.serial[row] = self._serials
            self.bucket[row] = hash64(name) % self.item_buckets
        return np.fromiter(map(self._rows.__getitem__, names), np.int32, len(names))

    def _sweep(self, keep: int) -> None:
        """Drop all but `keep` rows, least recently used first; never one of the present call."""
        live = np.fromiter(self._rows.values(), np.int64, len(self._rows))
        live = live[self._used[live] <= self._tick]
        order = live[np.lexsort((live, self._used[live], self._catalogued[live]))]
        dropped = order[: max(0, len(self._rows) - max(0, keep))]
        self.swept += len(dropped)
        self.catalogued_swept += int(self._catalogued[dropped].sum())
        for row in dropped.tolist():
            del self._rows[self.names[row]]
            self.names[row] = ""
            self._forget_entry(row)
        self.serial[dropped] = 0
        self._free.extend(dropped.tolist())

    def _forget_entry(self, row: int) -> None:
        self._catalogued[row] = False
        self.category[row] = CATEGORY_UNKNOWN
        self.content[row] = 0

    def _reserve(self, count: int) -> None:
        """Have `count` free rows, growing every column by doubling."""
        if len(self._free) >= count:
            return
        old = len(self.names)
        grow = max(count - len(self._free), old, 1024)
        self.names.extend([""] * grow)
        self._free.extend(range(old + grow - 1, old - 1, -1))
        for column in ("bucket", "category", "content", "serial", "_used", "_catalogued"):
            values = getattr(self, column)
            setattr(self, column, np.concatenate((values, np.zeros((grow, *values.shape[1:]), values.dtype))))

"""What a partition knows of its items: how much each is asked for and touched, and from that the popular and category lists.

In: touches (events) and demands (ranked pairs) of items, with event time. Out: slots (this table's own dense numbers) with
columns, and lists of slots that candidates come from. Never: an authority; it is soft, starts from priors and may be lost.

Counts decay exponentially. They are kept *forward* decayed (Cormode et al. 2009, "Forward decay"): an event at ts adds
exp((ts - epoch) / tau), a read multiplies by exp(-(now - epoch) / tau). So order of arrival doesn't matter, nothing is
rewritten as time passes, and the ranking of items needs no decay at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from schemas.keys import hash64
from streams.items import ItemIndex
from streams.state.column_log import Changed, ColumnLog, NameLog
from streams.state.store import Store, Transaction

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int32] | npt.NDArray[np.int64]

HOUR_MS = 3_600_000
_EXPONENT_MAX = 40.0
_KEEP_SHARE = 0.75
_REFRESH_TOUCHES_MIN = 256
_LISTED_MIN = 0.01

_TIMES, _COUNTS = ("first_ms", "used_ms"), ("demand_day", "demand_4h", "touched_day")

ITEM_FEATURES = ("demand_day", "demand_4h", "touched_day", "demand_share", "item_new", "item_idle")
"""Columns of `ItemTable.features`: log1p of decayed counts, a quarter of the log share of the day's demand, exp(-hours / 24)
since the item was first seen and exp(-hours / 4) since it was last seen. All bounded: nothing drifts as a partition ages."""


class Decayed:
    """Exponentially decayed counts by row, with time constant `tau_ms`."""

    def __init__(self, tau_ms: float) -> None:
        self.tau_ms = tau_ms
        self.epoch = 0
        self.raw = np.zeros(0)

    def grow(self, rows: int) -> None:
        """Have `rows` rows."""
        self.raw = np.concatenate((self.raw, np.zeros(rows - len(self.raw))))

    def add(self, rows: Index, ts: I64, amount: F64 | float = 1.0) -> None:
        """Count `amount` for each row at its time."""
        if not len(rows):
            return
        newest = int(ts.max())
        if (newest - self.epoch) / self.tau_ms > _EXPONENT_MAX:
            self.raw *= np.exp(-min(700.0, (newest - self.epoch) / self.tau_ms))
            self.epoch = newest
        np.add.at(self.raw, rows, amount * np.exp((ts - self.epoch) / self.tau_ms))

    def read(self, rows: Index | slice, now: int) -> F64:
        """The counts as of `now`."""
        decay = np.exp(np.clip((self.epoch - now) / self.tau_ms, -700.0, _EXPONENT_MAX))
        counts: F64 = self.raw[rows] * decay
        return counts


class ItemVectors(Protocol):
    """What is asked of a ranker here: its own space of items."""

    def item_vectors(self, bucket: I32, category: I32, content: F32) -> F32:
        """float32 [n, k]."""


class ItemTable:
    """Items of one partition by slot. Sweeps, which renumber slots, happen only in `sweep`, between batches."""

    def __init__(self, items: ItemIndex, items_max: int, popular_max: int, category_max: int) -> None:
        self.items, self.items_max = items, items_max
        self.popular_max, self.category_max = popular_max, category_max
        self.names: list[str] = []
        self._slots: dict[str, int] = {}
        self.hash = np.zeros(0, np.uint64)
        self.category = np.zeros(0, np.int32)
        self.first_ms = np.zeros(0, np.int64)
        self.used_ms = np.zeros(0, np.int64)
        self.demand_day, self.demand_4h = Decayed(24 * HOUR_MS), Decayed(4 * HOUR_MS)
        self.touched_day = Decayed(24 * HOUR_MS)
        self.features = np.zeros((0, len(ITEM_FEATURES)), np.float32)
        self.popular = np.zeros(0, np.int32)
        self._by_category = np.zeros(0, np.int32)
        self._category_starts = np.zeros(1, np.int64)
        self._touches = 0
        self.refreshes = 0
        self._unseen = np.array(
            [0.0, 0.0, 0.0, 0.0, 1.0, 1.0], np.float32
        )  # features of an item until the next refresh
        self._changed, self._renumbered = Changed(), False
        self._name_log = NameLog("item_names")
        self._log = ColumnLog(
            "item_columns",
            [("category", "<i4"), *((name, "<i8") for name in _TIMES), *((name, "<f8") for name in _COUNTS)],
        )

    def __len__(self) -> int:
        return len(self.names)

    def intern(self, names: Sequence[str], now: int) -> I32:
        """The slot of each id, int32 [n]; unknown ids get one."""
        try:
            return np.fromiter(map(self._slots.__getitem__, names), np.int32, len(names))
        except KeyError:
            self._add([name for name in dict.fromkeys(names) if name not in self._slots], now)
        return np.fromiter(map(self._slots.__getitem__, names), np.int32, len(names))

    def hashes(self, names: Sequence[str]) -> U64:
        """hash64 of each id, looked up where the item has a slot; makes none."""
        slots, known = self._slots, self.hash
        values = (known[slot] if (slot := slots.get(name)) is not None else hash64(name) for name in names)
        return np.fromiter(values, np.uint64, len(names))

    def touch(self, slots: I32, ts: I64) -> None:
        """Events on these items; their categories are read anew, so that a late catalogue shows."""
        self.touched_day.add(slots, ts)
        self._seen(slots, ts)

    def demand(self, slots: I32, ts: I64) -> None:
        """These items were ranked for somebody."""
        self.demand_day.add(slots, ts)
        self.demand_4h.add(slots, ts)
        self._seen(slots, ts)

    def rows(self, slots: Index) -> I32:
        """Rows of the item index, valid for this batch."""
        names = self.names
        return self.items.intern([names[slot] for slot in slots.tolist()])

    def in_category(self, categories: Index) -> tuple[I64, I64]:
        """Where each category's list lies in `listed`: starts and ends, int64 [n]; best first, at most `category_max` long."""
        at = np.minimum(categories, len(self._category_starts) - 2)
        known = (categories > 0) & (categories < len(self._category_starts) - 1)
        starts = np.where(known, self._category_starts[np.maximum(at, 0)], 0)
        ends = np.where(known, self._category_starts[np.maximum(at, 0) + 1], 0)
        return starts, np.minimum(ends, starts + self.category_max)

    @property
    def listed(self) -> I32:
        """Slots by category, best first in each."""
        return self._by_category

    def refresh_if_due(self, now: int) -> bool:
        """Make lists and features anew once enough was seen since the last time: work per event stays constant."""
        if (
            self._touches < max(_REFRESH_TOUCHES_MIN, len(self) // 32)
            and self.refreshes
            and len(self.features) >= len(self)
        ):
            return False
        self._touches = 0
        self.refreshes += 1
        self._refresh(now)
        return True

    def sweep(self) -> I32 | None:
        """When over `items_max`: forget the longest unused; returns old slot → new slot (-1: gone), else None."""
        if len(self) <= self.items_max:
            return None
        keep = int(self.items_max * _KEEP_SHARE)
        order = np.lexsort((np.arange(len(self)), self.used_ms[: len(self)]))
        kept = np.sort(order[len(self) - keep :])
        moved = np.full(len(self), -1, np.int32)
        moved[kept] = np.arange(keep)
        self.names = [self.names[slot] for slot in kept.tolist()]
        self._slots = {name: slot for slot, name in enumerate(self.names)}
        for values in self._columns():
            values[:keep] = values[kept]
            values[keep:] = 0
        self.refreshes = 0
        self._changed.everything()
        self._renumbered = True
        return moved

    @property
    def epochs(self) -> tuple[int, int, int]:
        """What the three decayed counts are relative to; kept with the rows."""
        return self.demand_day.epoch, self.demand_4h.epoch, self.touched_day.epoch

    def save(self, txn: Transaction, saved_epochs: tuple[int, int, int]) -> None:
        """Write the items that changed; all of them where the counts have another epoch than when they were saved last."""
        if saved_epochs != self.epochs:
            self._changed.everything()
        self._name_log.save(self.names, self._renumbered, txn)
        self._renumbered = False
        counts = {name: getattr(self, name).raw for name in _COUNTS}
        times = {name: getattr(self, name) for name in _TIMES}
        self._log.save(self._changed, 0, len(self), counts | times | {"category": self.category}, txn)

    def load(self, store: Store, size: int | None, epochs: tuple[int, int, int]) -> bool:
        """Take `size` saved items; lists and features are made anew at the next refresh. False: nothing that fits."""
        names, table = self._name_log.load(store), self._log.load(store, size)
        if table is None or size is None or len(names) != size:
            self._changed.everything()
            self._renumbered = True
            return False
        if not size:
            return True
        self._add(names, 0)
        for name in (*_TIMES, "category"):
            getattr(self, name)[:size] = table[name]
        for name, epoch in zip(_COUNTS, epochs, strict=True):
            getattr(self, name).raw[:size] = table[name]
            getattr(self, name).epoch = epoch
        self._changed.take()
        return True

    def _columns(self) -> list[npt.NDArray[Any]]:
        decayed = (self.demand_day.raw, self.demand_4h.raw, self.touched_day.raw)
        return [self.hash, self.category, self.first_ms, self.used_ms, *decayed]

    def _add(self, new: list[str], now: int) -> None:
        first = len(self.names)
        self.names.extend(new)
        self._slots.update(zip(new, range(first, len(self.names)), strict=True))
        if len(self.names) > len(self.hash):
            self._grow(max(len(self.names), 2 * len(self.hash), 1024))
        slots = slice(first, len(self.names))
        self.hash[slots] = np.fromiter(map(hash64, new), np.uint64, len(new))
        rows = self.items.intern(new)  # before its arrays are looked at: they are replaced when they grow
        self.category[slots] = self.items.category[rows]
        self.first_ms[slots] = self.used_ms[slots] = now
        self.features[slots] = self._unseen
        self._changed.add(np.arange(first, len(self.names)))

    def _grow(self, rows: int) -> None:
        def grown(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate((values, np.zeros((rows - len(values), *values.shape[1:]), values.dtype)))

        self.hash, self.category = grown(self.hash), grown(self.category)
        self.first_ms, self.used_ms = grown(self.first_ms), grown(self.used_ms)
        self.features = grown(self.features)
        for decayed in (self.demand_day, self.demand_4h, self.touched_day):
            decayed.grow(rows)

    def _seen(self, slots: I32, ts: I64) -> None:
        np.maximum.at(self.used_ms, slots, ts)
        self._touches += len(slots)
        unique = np.unique(slots)
        self._changed.add(unique)
        rows = self.rows(unique)
        self.category[unique] = self.items.category[rows]

    def _refresh(self, now: int) -> None:
        n = slice(0, len(self))
        day, quick, touched = (table.read(n, now) for table in (self.demand_day, self.demand_4h, self.touched_day))
        share = np.log((day + 0.1) / (day.sum() + 0.1 * len(day) + 1.0)) / 4.0
        new = np.exp((self.first_ms[n] - now) / (24.0 * HOUR_MS))
        idle = np.exp((np.minimum(self.used_ms[n], now) - now) / (4.0 * HOUR_MS))
        columns = (np.log1p(day), np.log1p(quick), np.log1p(touched), share, new, idle)
        self.features[n] = np.stack(columns, axis=1)
        self._unseen = np.array([0.0, 0.0, 0.0, share.min(initial=0.0), 1.0, 1.0], np.float32)
        self._list(day + touched)

    def _list(self, wanted: F64) -> None:
        """Popular items over all and by category; asked for and touched count alike."""
        alive = np.flatnonzero(wanted > _LISTED_MIN)
        order = alive[np.lexsort((alive, -wanted[alive]))]
        self.popular = order[: self.popular_max].astype(np.int32)
        category = self.category[order]
        by_category = np.argsort(category, kind="stable")
        self._by_category = order[by_category].astype(np.int32)
        highest = int(category.max()) if len(category) else 0
        self._category_starts = np.searchsorted(category[by_category], np.arange(highest + 2))

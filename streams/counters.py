"""How often each item was shown and liked, and how active each user was, over the last 24 hours.

In: event batches. Out: two counts an item (impressions, positives) and two a user (events, positives) in (now - 24 h, now].
Never: a decayed or averaged number; readers derive those.

Counts lie in hourly panes. A pane counts iff now - 24 h < its start <= now, which is the running hour and the 23 before it:
nothing older than 24 h ever counts, and of the oldest hour up to one pane is missing. A row keeps the 24 panes up to its own
newest, so it is a function of the events alone, however they were cut into batches.
Row: per pane that has any, oldest first, u32 pane, u32, u32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from models.jit import compiled, reads, writes
from schemas.events import IMPRESSION_CODE, POSITIVE_CODES, EventBatch
from schemas.keys import user_key
from streams.items import ItemIndex
from streams.state.prune import Rule, Rules
from streams.state.store import FoldCounts, Reader, Transaction

PANE_MS = 3_600_000
PANES = 24
WINDOW_MS = PANE_MS * PANES
COUNT_MAX = 2**31 - 1
"""A pane's count stops here: a saturated sum is the same in any order, a wrapped one is wrong in all."""

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Index = npt.NDArray[np.int64] | npt.NDArray[np.int32]

_NUMBER_BYTES, _RECORD_BYTES = 4, 12
_NEVER = -(2**30)  # a pane no event can have
_POSITIVE = np.zeros(256, np.bool_)
_POSITIVE[list(POSITIVE_CODES)] = True


class Rings:
    """Pane counts of many keys as arrays: key i's pane p lies in slot p % 24 of row i; `panes` says whose a slot is."""

    def __init__(self, rows: int) -> None:
        self.panes = np.full((rows, PANES), _NEVER, np.int32)
        self.counts = np.zeros((rows, PANES, 2), np.int32)
        self.newest = np.full(rows, _NEVER, np.int32)

    def __len__(self) -> int:
        return len(self.newest)

    def grow(self, rows: int) -> None:
        """Have at least `rows` rows."""
        if rows > len(self):
            more = Rings(max(rows, 2 * len(self)) - len(self))
            self.panes = np.concatenate((self.panes, more.panes))
            self.counts = np.concatenate((self.counts, more.counts))
            self.newest = np.concatenate((self.newest, more.newest))

    def load(self, rows: Index, values: Sequence[bytes | None]) -> None:
        """Replace these rows, each named once, by what the store has for them."""
        self.panes[rows] = _NEVER
        self.newest[rows] = _NEVER
        found = [value or b"" for value in values]
        records = np.frombuffer(b"".join(found), "<u4").reshape(-1, 3).astype(np.int32)
        if not len(records):
            return
        sizes = np.fromiter(map(len, found), np.int64, len(found)) // _RECORD_BYTES
        owner = np.repeat(rows, sizes)
        slot = records[:, 0] % PANES
        self.panes[owner, slot] = records[:, 0]
        self.counts[owner, slot] = records[:, 1:]
        some = sizes > 0
        self.newest[rows[some]] = records[np.cumsum(sizes)[some] - 1, 0]

    def add(
        self, rows: Index, panes: npt.NDArray[np.int32], first: npt.NDArray[np.bool_], second: npt.NDArray[np.bool_]
    ) -> int:
        """Count events [n]: add `first` and `second` to pane `panes` of `rows`; returns how many came too late for their row."""
        np.maximum.at(self.newest, rows, panes)
        kept = panes > self.newest[rows] - PANES
        late = len(kept) - int(kept.sum())
        if late:
            rows, panes, first, second = rows[kept], panes[kept], first[kept], second[kept]
        places, event_place = np.unique(rows.astype(np.int64) * PANES + panes % PANES, return_inverse=True)
        pane = np.empty(len(places), np.int32)
        pane[event_place] = panes  # one pane a place: of two 24 hours apart the older was late
        flat_panes, flat_counts = self.panes.reshape(-1), self.counts.reshape(-1, 2)
        flat_counts[places[flat_panes[places] != pane]] = 0
        flat_panes[places] = pane
        total = flat_counts[places].astype(np.int64)
        for column, flags in enumerate((first, second)):
            total[:, column] += np.bincount(event_place, flags, len(places)).astype(np.int64)
        flat_counts[places] = np.minimum(total, COUNT_MAX)
        return late

    def encode(self, rows: Index) -> list[bytes]:
        """The store's row of each of these."""
        newest = self.newest[rows]
        slots = (newest[:, None] + np.arange(1, PANES + 1)) % PANES  # oldest pane first
        panes = np.take_along_axis(self.panes[rows], slots, 1)
        counts = np.take_along_axis(self.counts[rows], slots[:, :, None], 1)
        live = panes > newest[:, None] - PANES
        records = np.concatenate((panes[:, :, None], counts), 2)[live].astype("<u4").tobytes()
        ends = (np.cumsum(live.sum(1)) * _RECORD_BYTES).tolist()
        return [records[start:end] for start, end in pairwise([0, *ends])]

    def window(self, rows: Index, now: int | I64) -> I64:
        """Counts in (now - 24 h, now], int64 [n, 2]; `now` is one time or one a row."""
        pane = np.broadcast_to(np.asarray(now, np.int64) // PANE_MS, (len(rows),))
        counts = np.empty((len(rows), 2), np.int64)
        _window(self.panes, self.counts, rows.astype(np.int64), np.ascontiguousarray(pane), counts)
        return counts


@compiled(reads(np.int32, 2), reads(np.int32, 3), reads(np.int64), reads(np.int64), writes(np.int64, 2))
def _window(panes: I32, counts: I32, rows: I64, now: I64, out: I64) -> None:
    for i in range(len(rows)):
        row = rows[i]
        out[i, 0] = out[i, 1] = 0
        for slot in range(PANES):
            if 0 <= now[i] - panes[row, slot] < PANES:
                out[i, 0] += counts[row, slot, 0]
                out[i, 1] += counts[row, slot, 1]


@compiled(reads(np.uint32), reads(np.int64), reads(np.int64), writes(np.int64, 2))
def _window_of_records(records: npt.NDArray[np.uint32], ends: I64, now: I64, out: I64) -> None:
    """The same from the store's rows end to end; row i's records end at `ends[i]`, in numbers."""
    start = 0
    for i in range(len(ends)):
        out[i, 0] = out[i, 1] = 0
        for at in range(start, ends[i], 3):
            if 0 <= now[i] - np.int64(records[at]) < PANES:
                out[i, 0] += records[at + 1]
                out[i, 1] += records[at + 2]
        start = ends[i]


class ItemCounters:
    """Item counters with a hot copy by item row, and user counters without one.

    The truth is the store's rows. The hot copy is loaded in bulk when an item is first touched, and taken back if the
    transaction that it follows was not committed.
    """

    def __init__(self, items: ItemIndex) -> None:
        self._items = items
        self._rings = Rings(0)
        self._loaded = np.zeros(0, np.int64)  # serial of the item whose counts a row holds; -1: none
        self._open: Transaction | None = None  # the hot copy is ahead of the store by this one, in these rows:
        self._ahead: list[Index] = []
        self._mixed = False  # another reader came while it was open

    def fold(self, events: EventBatch, txn: Transaction) -> FoldCounts:
        """Count a batch for its items and its users; the counts returned are the items'."""
        positive = _POSITIVE[events.types]
        panes = (events.ts // PANE_MS).astype(np.int32)
        self._fold_users(events, panes, positive, txn)
        impression = events.types == IMPRESSION_CODE
        counted = np.flatnonzero(impression | positive)
        if not len(counted):
            return FoldCounts()
        rows = self._items.intern([events.items[i] for i in counted.tolist()])
        self._ensure(txn, rows)
        late = self._rings.add(rows, panes[counted], impression[counted], positive[counted])
        touched = np.unique(rows)
        if self._open is not txn:
            self._open, self._ahead, self._mixed = txn, [], False
        self._ahead.append(touched)
        for row, value in zip(touched.tolist(), self._rings.encode(touched), strict=True):
            txn.put("item_counters", user_key(self._items.names[row]), value)
        return FoldCounts(accepted=len(counted) - late, late=late)

    def read(self, reader: Reader, item_rows: Index, now: int | I64) -> I64:
        """(impressions, positives) in (now - 24 h, now] of each item row, int64 [n, 2]; `now` is one time or int64 [n]."""
        self._ensure(reader, item_rows)
        return self._rings.window(item_rows, now)

    def read_users(self, reader: Reader, users: Sequence[str], now: int | I64) -> I64:
        """(events, positives) in (now - 24 h, now] of each user, int64 [r, 2]."""
        values = [value or b"" for value in reader.get("user_counters", [user_key(user) for user in users])]
        pane = np.broadcast_to(np.asarray(now, np.int64) // PANE_MS, (len(users),))
        ends = np.cumsum([len(value) // _NUMBER_BYTES for value in values], dtype=np.int64)
        counts = np.empty((len(users), 2), np.int64)
        _window_of_records(np.frombuffer(b"".join(values), "<u4"), ends, np.ascontiguousarray(pane), counts)
        return counts

    def rules(self) -> Rules:
        """Rows show for 24 h and are kept twice as long: panes next to one that still shows are part of a row's bytes."""
        rule = Rule(_newest_ms, WINDOW_MS, 2 * WINDOW_MS)
        return {"item_counters": rule, "user_counters": rule}

    def _fold_users(
        self, events: EventBatch, panes: npt.NDArray[np.int32], positive: npt.NDArray[np.bool_], txn: Transaction
    ) -> None:
        places = {user: row for row, user in enumerate(dict.fromkeys(events.users))}
        keys = [user_key(user) for user in places]
        rings, rows = Rings(len(keys)), np.arange(len(keys))
        rings.load(rows, txn.get("user_counters", keys))
        event_row = np.fromiter(map(places.__getitem__, events.users), np.int64, len(events))
        rings.add(event_row, panes, np.ones(len(events), np.bool_), positive)
        for key, value in zip(keys, rings.encode(rows), strict=True):
            txn.put("user_counters", key, value)

    def _ensure(self, reader: Reader, rows: Index) -> None:
        """Bring these rows of the hot copy up to what `reader` sees."""
        self._settle(reader)
        if len(self._items.serial) > len(self._loaded):
            self._rings.grow(len(self._items.serial))
            grown = np.full(len(self._rings) - len(self._loaded), -1, np.int64)
            self._loaded = np.concatenate((self._loaded, grown))
        missing = self._loaded[rows] != self._items.serial[rows]
        if not missing.any():
            return
        rows = np.unique(rows[missing])
        keys = [user_key(self._items.names[row]) for row in rows.tolist()]
        self._rings.load(rows, reader.get("item_counters", keys))
        self._loaded[rows] = self._items.serial[rows]

    def _settle(self, reader: Reader) -> None:
        """Take the hot copy back where it holds what `reader` doesn't see: a transaction that is still open, or was dropped."""
        if self._open is None or (self._open is reader and not self._mixed):
            return
        if self._mixed or not self._open.committed:
            for rows in self._ahead:
                self._loaded[rows] = -1
        self._mixed = not self._open.committed
        if self._open.committed:
            self._open, self._ahead = None, []


def _newest_ms(_: bytes, value: bytes) -> int:
    return int.from_bytes(value[-_RECORD_BYTES : 4 - _RECORD_BYTES], "little") * PANE_MS

"""Each user's newest events: the history that the FM, the ranker and the features read.

In: event batches. Out: per user the `rows_max` newest by (ts, offset).
Never: judges age; a history is as old as its user's silence.

Which rows are kept depends on the set of events alone, so neither the order of arrival nor the cut of the batches shows.
Row: u16 count, then per event ts i64, offset i64, type u8, length u16, then the item ids' bytes; oldest first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.events import IMPRESSION_CODE, EventBatch
from schemas.keys import user_key
from streams.state.prune import FOREVER, Rules
from streams.state.store import FoldCounts, Reader, Transaction

ROWS_MAX = 65_535

_COUNT = struct.Struct("<H")
_EVENT = struct.Struct("<qqBH")
_EVENT_TYPE = np.dtype([("ts", "<i8"), ("offset", "<i8"), ("type", "u1"), ("length", "<u2")])

_Entry = tuple[int, int, int, bytes]  # ts, offset, type, item


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """One user's history, newest last: `items`, `types` uint8 [h], `ts` int64 [h], `offsets` int64 [h]."""

    items: list[str]
    types: npt.NDArray[np.uint8]
    ts: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.items)


class History:
    """One table of histories: of the impressions alone, or of everything but them."""

    def __init__(self, table: str, rows_max: int, impressions: bool) -> None:
        assert 0 < rows_max <= ROWS_MAX, f"rows_max is {rows_max}; it must be 1 to {ROWS_MAX}"
        self.table, self.rows_max, self.impressions = table, rows_max, impressions

    def fold(self, events: EventBatch, txn: Transaction) -> FoldCounts:
        """Take the batch's events of this kind; `late`: older than all of a full history."""
        mine = np.flatnonzero((events.types == IMPRESSION_CODE) == self.impressions).tolist()
        ts, offsets, types = events.ts.tolist(), events.offsets.tolist(), events.types.tolist()
        users: dict[str, list[_Entry]] = {}
        for i in mine:
            users.setdefault(events.users[i], []).append((ts[i], offsets[i], types[i], events.items[i].encode()))
        keys = [user_key(user) for user in users]
        late = 0
        for key, value, new in zip(keys, txn.get(self.table, keys), users.values(), strict=True):
            new.sort()
            row, dropped = self._merge(value, new)
            late += dropped
            txn.put(self.table, key, row)
        return FoldCounts(accepted=len(mine) - late, late=late)

    def read(self, reader: Reader, users: Sequence[str]) -> list[HistoryRow]:
        """The history of each user, empty where there is none."""
        return [_decode(value) for value in reader.get(self.table, [user_key(user) for user in users])]

    def rules(self) -> Rules:
        """A history lives for ever: its size is bounded, not its age."""
        return {self.table: FOREVER}

    def _merge(self, value: bytes | None, new: list[_Entry]) -> tuple[bytes, int]:
        """The new row, and how many of `new` (ascending) are not in it."""
        if value is None:
            kept = new[-self.rows_max :]
            return _encode(kept), len(new) - len(kept)
        (count,) = _COUNT.unpack_from(value)
        last = _EVENT.unpack_from(value, 2 + (count - 1) * _EVENT.size)
        if new[0][:2] > last[:2] and len(new) <= self.rows_max:
            return self._append(value, count, new), 0
        merged = sorted(_entries(value) + new)[-self.rows_max :]
        oldest = merged[0][:2]
        return _encode(merged), sum(entry[:2] < oldest for entry in new)

    def _append(self, value: bytes, count: int, new: list[_Entry]) -> bytes:
        """The usual case, all of `new` after the row's last: bytes are cut in front and added behind, nothing is decoded."""
        drop = max(0, count + len(new) - self.rows_max)
        events_at, items_at = 2 + drop * _EVENT.size, 2 + count * _EVENT.size
        cut = sum(_EVENT.unpack_from(value, 2 + i * _EVENT.size)[3] for i in range(drop))
        packed = [_EVENT.pack(ts, offset, kind, len(item)) for ts, offset, kind, item in new]
        head, middle, tail = _COUNT.pack(count + len(new) - drop), value[events_at:items_at], value[items_at + cut :]
        return b"".join((head, middle, *packed, tail, *[item for _, _, _, item in new]))


def _encode(entries: list[_Entry]) -> bytes:
    packed = [_EVENT.pack(ts, offset, kind, len(item)) for ts, offset, kind, item in entries]
    return b"".join((_COUNT.pack(len(entries)), *packed, *[item for _, _, _, item in entries]))


def _entries(value: bytes) -> list[_Entry]:
    (count,) = _COUNT.unpack_from(value)
    at = 2 + count * _EVENT.size
    entries = []
    for ts, offset, kind, length in _EVENT.iter_unpack(value[2:at]):
        entries.append((ts, offset, kind, value[at : at + length]))
        at += length
    return entries


_EMPTY = HistoryRow([], np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64))


def _decode(value: bytes | None) -> HistoryRow:
    if value is None:
        return _EMPTY
    (count,) = _COUNT.unpack_from(value)
    events = np.frombuffer(value, _EVENT_TYPE, count, 2)
    text = value[2 + count * _EVENT.size :]
    items, at = [], 0
    if text.isascii():  # then bytes are characters: one decode for all
        joined = text.decode("ascii")
        for length in events["length"].tolist():
            items.append(joined[at : at + length])
            at += length
    else:
        for length in events["length"].tolist():
            items.append(text[at : at + length].decode())
            at += length
    return HistoryRow(items, events["type"].copy(), events["ts"].copy(), events["offset"].copy())

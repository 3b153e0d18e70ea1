"""Numbers by row that live in memory, kept in the store as a log of the rows that changed.

In: with each batch's transaction, which rows changed and their columns. Out: on opening, the columns as they were at the last
commit, bit for bit. Never: an increment (a row of the log holds values, so reading it twice changes nothing), or a log that
grows without end: once it is longer than the table, the whole table is written anew and the log before it deleted.

    soft    name, serial → layout u64, then records of (row number, its columns)

One put a batch, whatever the number of rows; n changed rows cost at most 2 n records in the long run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.keys import hash64, prefixed
from streams.state.store import Store, Transaction

_SERIAL = struct.Struct(">Q")
_LAYOUT = struct.Struct("<Q")
_PIECE_ROWS = 1 << 16
_LOG_ROWS_MIN = 4_096
_LOG_PIECES_MAX = 16_384
"""So that small batches over a large table leave no log that takes long to read and to delete."""

Field = tuple[str, str] | tuple[str, str, tuple[int, ...]]
Table = Mapping[str, npt.NDArray[Any]]
Rows = npt.NDArray[np.int64] | npt.NDArray[np.int32]


class Changed:
    """Which rows changed since they were last written. `everything`: they were renumbered, or all of them changed."""

    def __init__(self) -> None:
        self._rows: list[Rows] = []
        self._count = 0
        self._all = False

    def add(self, rows: Rows) -> None:
        """These rows (repeats are fine, -1 is none)."""
        if not self._all and len(rows):
            self._rows.append(rows)
            self._count += len(rows)
            if self._count > _PIECE_ROWS and len(self._rows) > 1:
                self._rows = [np.unique(np.concatenate(self._rows))]
                self._count = len(self._rows[0])

    def everything(self) -> None:
        """Every row."""
        self._rows, self._count, self._all = [], 0, True

    def take(self) -> npt.NDArray[np.int64] | None:
        """The rows, ascending, and begin anew; None: all."""
        if self._all:
            self._all = False
            return None
        rows = np.unique(np.concatenate(self._rows)).astype(np.int64) if self._rows else np.zeros(0, np.int64)
        self._rows, self._count = [], 0
        return rows


class ColumnLog:
    """One table of columns. `fields`: numpy's (name, type[, shape]) of each column, little-endian."""

    def __init__(self, name: str, fields: Sequence[Field]) -> None:
        self._prefix = prefixed(name.encode())
        self._dtype = np.dtype([("row", "<u4"), *fields])
        self._layout = hash64(repr(self._dtype.descr))
        self._first = self._next = self._logged = 0

    def save(self, changed: Changed, start: int, end: int, columns: Table, txn: Transaction) -> None:
        """Write the changed ones of rows [start, end); takes them from `changed`, so the transaction must be committed."""
        rows = changed.take()
        if rows is not None:
            rows = rows[(rows >= start) & (rows < end)]
            if not len(rows):
                return
        size = end - start
        pieces = self._next - self._first
        if (
            rows is None
            or self._logged + len(rows) > 2 * size + _LOG_ROWS_MIN
            or pieces >= _LOG_PIECES_MAX + size // 64
        ):
            for serial in range(self._first, self._next):
                txn.delete("soft", self._key(serial))
            self._first, self._logged = self._next, 0
            rows = np.arange(start, end)
        for at in range(0, len(rows), _PIECE_ROWS):
            self._put(rows[at : at + _PIECE_ROWS], columns, txn)

    def load(self, store: Store, end: int | None) -> npt.NDArray[Any] | None:
        """Columns of rows [0, end) as one structured array, zeros where nothing was written.

        None where they have another layout, or `end` is None (not wanted): save everything next, which deletes what is there.
        """
        table = np.zeros(end or 0, self._dtype)
        fits = end is not None
        for key, value in store.rows("soft", self._prefix):
            (serial,) = _SERIAL.unpack_from(key, len(self._prefix))
            self._first = serial if self._next == 0 else self._first
            self._next = serial + 1
            fits = fits and _LAYOUT.unpack_from(value)[0] == self._layout
            if fits:
                records = np.frombuffer(value, self._dtype, offset=_LAYOUT.size)
                self._logged += len(records)
                records = records[records["row"] < len(table)]
                table[records["row"]] = records
        return table if fits else None

    def _put(self, rows: npt.NDArray[np.int64], columns: Table, txn: Transaction) -> None:
        records = np.empty(len(rows), self._dtype)
        records["row"] = rows
        for name in self._dtype.names or ():
            if name != "row":
                records[name] = columns[name][rows]
        txn.put("soft", self._key(self._next), _LAYOUT.pack(self._layout) + records.tobytes())
        self._next += 1
        self._logged += len(rows)

    def _key(self, serial: int) -> bytes:
        return self._prefix + _SERIAL.pack(serial)


class NameLog:
    """Names by row, which are only ever added, or all renumbered."""

    def __init__(self, name: str) -> None:
        self._prefix = prefixed(name.encode())
        self._saved = 0
        self._keys: list[bytes] = []

    def save(self, names: Sequence[str], renumbered: bool, txn: Transaction) -> None:
        """Write the names that are new since the last time; all where the rows were renumbered."""
        if renumbered:
            for key in self._keys:
                txn.delete("soft", key)
            self._keys, self._saved = [], 0
        for first in range(self._saved, len(names), _PIECE_ROWS):
            key = self._prefix + _SERIAL.pack(first)
            txn.put("soft", key, msgspec.msgpack.encode(names[first : first + _PIECE_ROWS]))
            self._keys.append(key)
        self._saved = len(names)

    def load(self, store: Store) -> list[str]:
        """All names in the order of their rows."""
        names: list[str] = []
        for key, part in self._parts(store):
            self._keys.append(key)
            names += part
        self._saved = len(names)
        return names

    def _parts(self, store: Store) -> Iterator[tuple[bytes, list[str]]]:
        for key, value in store.rows("soft", self._prefix):
            yield key, msgspec.msgpack.decode(value, type=list[str])

"""What every store promises: bulk reads, and one atomic write of rows and stamps.

In: keys and values as bytes, and for each topic the next offset to fold (its stamp). Out: the same, durable or not as the store is.
Never: judges what a row means, keeps time, or writes anything outside of `commit`.

An operator reads in bulk, computes, puts its rows into a `Transaction` and commits that once. Rows and stamps land together or not
at all, which is what makes the tables a function of the offsets reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

TABLES: tuple[str, ...] = (
    "history",  # user → the newest active events
    "shown",  # user → the newest impressions
    "item_counters",  # item → hourly panes
    "user_counters",  # user → hourly panes
    "pairs",  # user, space, item → one compressed vector
    "user_panes",  # user, space, pane → count and sum of vectors
    "soft",  # what may be lost at the price of some FM work: weights, ledger, clock
)
"""Every table there is; a column family each in RocksDB."""

Row = tuple[bytes, bytes]


class Reader(Protocol):
    """What a fold or a lookup reads through: a store, or a transaction that sees its own writes."""

    def get(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None where there is none."""

    def scan(self, table: str, prefixes: Sequence[bytes]) -> list[list[Row]]:
        """For each prefix its rows, in key order."""


class Store(Reader, Protocol):
    """One partition's state. Not for several threads at once, but for `rows`, which reads a snapshot."""

    @property
    def version(self) -> int:
        """Commits since opening: how a transaction sees that it is out of date."""

    def rows(self, table: str, prefix: bytes = b"", after: bytes = b"") -> Iterator[Row]:
        """Rows with this prefix and a key greater than `after`, in key order, as of the moment of the call."""

    def stamp(self, topic: str) -> int | None:
        """The next offset of `topic` to fold; None: never folded."""

    def stamps(self) -> dict[str, int]:
        """All stamps."""

    def commit(self, transaction: Transaction) -> None:
        """Write all rows and stamps of the transaction, or none of them. Raises `FatalError` when the disk refuses."""

    def checkpoint(self, folder: Path) -> None:
        """A consistent copy in a folder that does not exist yet."""

    def close(self) -> None:
        """Give the store back; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class FoldCounts:
    """What became of a batch's rows: taken, dropped as repeated, dropped as too old."""

    accepted: int = 0
    duplicate: int = 0
    late: int = 0

    def __add__(self, other: FoldCounts) -> FoldCounts:
        return FoldCounts(self.accepted + other.accepted, self.duplicate + other.duplicate, self.late + other.late)


class Rows:
    """Rows in memory, found by key or by prefix. Values are bytes; None marks a deletion that hides a row below.

    Composite keys begin with a length-prefixed part (`schemas.keys.prefixed`), and rows are grouped by it: a scan of one user
    touches that user's keys alone. Any other prefix is found too, by looking at every key.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes | None] = {}
        self._groups: dict[bytes, set[bytes]] = {}  # first part → the longer keys that begin with it

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set a row; None is kept as a mark."""
        if key not in self.values and len(part := _first_part(key)) < len(key):
            self._groups.setdefault(part, set()).add(key)
        self.values[key] = value

    def remove(self, key: bytes) -> None:
        """Take a row out altogether."""
        if self.values.pop(key, _MISSING) is not _MISSING and (group := self._groups.get(part := _first_part(key))):
            group.discard(key)
            if not group:
                del self._groups[part]

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys with this prefix, in no order."""
        if not prefix:
            return list(self.values)
        part = _first_part(prefix)
        if len(part) < 2 or len(part) < 2 + int.from_bytes(part[:2]):
            return [key for key in self.values if key.startswith(prefix)]
        found = [key for key in self._groups.get(part, ()) if key.startswith(prefix)]
        if part == prefix and part in self.values:
            found.append(part)
        return found

    def sorted_rows(self, prefix: bytes) -> list[Row]:
        """The rows with this prefix in key order, without the marks."""
        return [(key, value) for key in sorted(self.keys(prefix)) if (value := self.values[key]) is not None]


_MISSING = object()


def _first_part(key: bytes) -> bytes:
    return key[: 2 + int.from_bytes(key[:2])]


class Transaction:
    """The writes of one batch over a store; reads see them. One at a time: the store refuses one that it has overtaken.

    A transaction that is dropped leaves no trace, so a failed batch is simply folded again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.version = store.version
        self.committed = False
        self.writes: dict[str, Rows] = {table: Rows() for table in TABLES}
        self.stamps: dict[str, int] = {}

    def get(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, this transaction's own where it wrote."""
        written = self.writes[table].values
        if not written:
            return self._store.get(table, keys)
        below = [key for key in keys if key not in written]
        values = dict(zip(below, self._store.get(table, below), strict=True)) if below else {}
        return [written[key] if key in written else values[key] for key in keys]

    def scan(self, table: str, prefixes: Sequence[bytes]) -> list[list[Row]]:
        """For each prefix its rows in key order, this transaction's writes over the store's."""
        found = self._store.scan(table, prefixes)
        writes = self.writes[table]
        if not writes.values:
            return found
        return [_over(writes, prefix, below) for prefix, below in zip(prefixes, found, strict=True)]

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Set one row."""
        self.writes[table].put(key, value)

    def delete(self, table: str, key: bytes) -> None:
        """Remove one row, whether or not it is there."""
        self.writes[table].put(key, None)

    def stamp(self, topic: str, next_offset: int) -> None:
        """Say how far `topic` is folded once this is committed."""
        self.stamps[topic] = next_offset


def _over(writes: Rows, prefix: bytes, below: list[Row]) -> list[Row]:
    """`below` with the writes of one prefix laid over it."""
    keys = writes.keys(prefix)
    if not keys:
        return below
    merged: dict[bytes, bytes | None] = dict(below)
    merged.update((key, writes.values[key]) for key in keys)
    return sorted((key, value) for key, value in merged.items() if value is not None)


def check_commit(store: Store, transaction: Transaction) -> None:
    """Our own mistakes, caught before they are written: a transaction used twice or overtaken, a stamp that goes back."""
    assert not transaction.committed, "this transaction was committed before; begin another"
    assert transaction.version == store.version, "another transaction was committed since this one began"
    for topic, offset in transaction.stamps.items():
        reached = store.stamp(topic)
        assert reached is None or offset >= reached, f"the stamp of {topic} would go back from {reached} to {offset}"

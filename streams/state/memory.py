"""A store in memory: for replay, and for every test that needs no disk.

In and out: as `streams.state.store` promises. Never: survives its process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from schemas.errors import UsageError
from streams.state.store import TABLES, Row, Rows, Transaction, check_commit


class MemoryStore:
    """Tables as dictionaries; a commit can't fail half-way because nothing in it can fail."""

    def __init__(self) -> None:
        self.version = 0
        self._tables = {table: Rows() for table in TABLES}
        self._stamps: dict[str, int] = {}

    def get(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None where there is none."""
        return list(map(self._tables[table].values.get, keys))

    def scan(self, table: str, prefixes: Sequence[bytes]) -> list[list[Row]]:
        """For each prefix its rows, in key order."""
        return list(map(self._tables[table].sorted_rows, prefixes))

    def rows(self, table: str, prefix: bytes = b"", after: bytes = b"") -> Iterator[Row]:
        """Rows with this prefix and a key greater than `after`; sorted now, so later commits don't show."""
        return iter([row for row in self._tables[table].sorted_rows(prefix) if row[0] > after])

    def stamp(self, topic: str) -> int | None:
        """The next offset of `topic` to fold; None: never folded."""
        return self._stamps.get(topic)

    def stamps(self) -> dict[str, int]:
        """All stamps."""
        return dict(self._stamps)

    def commit(self, transaction: Transaction) -> None:
        """Apply the transaction."""
        check_commit(self, transaction)
        for table, writes in transaction.writes.items():
            rows = self._tables[table]
            for key, value in writes.values.items():
                if value is None:
                    rows.remove(key)
                else:
                    rows.put(key, value)
        self._stamps.update(transaction.stamps)
        self.version += 1
        transaction.committed = True

    def checkpoint(self, folder: Path) -> None:
        """Refused: what is in memory has no files to copy."""
        raise UsageError(f"A store in memory can't be copied to {folder}; keep the state on disk to take checkpoints.")

    def close(self) -> None:
        """Nothing to give back."""

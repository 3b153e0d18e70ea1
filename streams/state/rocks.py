"""The store on disk: one RocksDB a partition, a column family a table, rows and stamps in one write batch.

In and out: as `streams.state.store` promises. Never: lets RocksDB judge age (its own TTL is the wall clock's), or goes on after a
failed write.

The write-ahead log is on, and not synced: a killed process loses nothing; a machine that loses power goes back to an earlier
commit, stamps and rows together, and folds on from there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rocksdict import (
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompressionType,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
)

from schemas.errors import FatalError, SolarisError, StateError, UsageError
from streams.state.manifest import DATABASE_FOLDER, FolderLock, StateManifest, fit_folder, write_manifest
from streams.state.store import TABLES, Row, Transaction, check_commit

_META = "meta"  # topic → stamp
_PARTITION_BYTES_MIN = 4 << 20


@dataclass(frozen=True)
class StateConfig:
    """Limits of the state on disk. Bytes are a worker's, shared out among the partitions that it may come to own."""

    lock_wait_ms: int = 10_000
    write_buffer_bytes_max: int = 256 << 20
    block_cache_bytes_max: int = 256 << 20


def open_store(
    folder: Path,
    manifest: StateManifest,
    config: StateConfig | None = None,
    sleep: Callable[[float], None] | None = None,
) -> RocksStore:
    """Open or begin a partition's state in `folder`.

    A directory that doesn't fit the manifest is set aside (`RocksStore.aside` says where). One that another process holds is
    waited for, `config.lock_wait_ms` in steps of `sleep` (seconds; None: not at all). Raises `StateError` naming the directory when
    it stays held or is damaged, `FatalError` when the disk refuses.
    """
    config = config or StateConfig()
    lock = FolderLock(folder, config.lock_wait_ms, sleep)
    try:
        aside = fit_folder(folder, manifest)
        shares = max((topic.partitions for topic in manifest.topics.values()), default=1)
        return RocksStore(folder, manifest, _options(config, shares), lock, aside)
    except BaseException:
        lock.release()
        raise


class RocksStore:
    """Made by `open_store`. `aside`: where a directory that did not fit was set aside at opening, None if there was none."""

    def __init__(
        self, folder: Path, manifest: StateManifest, options: Options, lock: FolderLock, aside: Path | None
    ) -> None:
        self.version, self.folder, self.manifest, self.aside = 0, folder, manifest, aside
        self._lock: FolderLock | None = lock
        names = (*TABLES, _META)
        try:
            self._db = Rdict(str(folder / DATABASE_FOLDER), options, column_families=dict.fromkeys(names, options))
        except Exception as error:
            raise _unusable(folder, error) from error
        self._tables = {name: self._db.get_column_family(name) for name in names}
        self._handles = {name: self._db.get_column_family_handle(name) for name in names}
        self._open_rows: weakref.WeakSet[Generator[Row, None, None]] = weakref.WeakSet()
        stamps = self.rows(_META)
        self._stamps = {key.decode(): int.from_bytes(value) for key, value in stamps}

    def get(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None where there is none."""
        try:
            return cast("list[bytes | None]", self._tables[table].get(list(keys)))
        except Exception as error:
            raise _unreadable(self.folder, error) from error

    def scan(self, table: str, prefixes: Sequence[bytes]) -> list[list[Row]]:
        """For each prefix its rows, in key order."""
        family = self._tables[table]
        try:
            return [_scan(family, prefix) for prefix in prefixes]
        except Exception as error:
            raise _unreadable(self.folder, error) from error

    def rows(self, table: str, prefix: bytes = b"", after: bytes = b"") -> Iterator[Row]:
        """Rows with this prefix and a key greater than `after`, as of now; may be read by another thread."""
        bounds = _bounds(prefix)
        at = _sought(self._tables[table], max(prefix, after), bounds)  # the iterator pins its snapshot here
        rows = _read(at, bounds, after, self.folder)
        self._open_rows.add(rows)
        return rows

    def stamp(self, topic: str) -> int | None:
        """The next offset of `topic` to fold; None: never folded."""
        return self._stamps.get(topic)

    def stamps(self) -> dict[str, int]:
        """All stamps."""
        return dict(self._stamps)

    def commit(self, transaction: Transaction) -> None:
        """Write all rows and stamps in one write batch. Raises `FatalError` when the disk refuses; nothing is written then."""
        check_commit(self, transaction)
        batch = WriteBatch(raw_mode=True)
        for table, writes in transaction.writes.items():
            handle = self._handles[table]
            for key, value in writes.values.items():
                if value is None:
                    batch.delete(key, handle)
                else:
                    batch.put(key, value, handle)
        for topic, offset in transaction.stamps.items():
            batch.put(topic.encode(), offset.to_bytes(8), self._handles[_META])
        try:
            self._db.write(batch)
        except Exception as error:
            raise FatalError(
                f"The state in {self.folder} can't be written: {error}. Free or mend the disk and start again; "
                "nothing of the batch was committed"
            ) from error
        self._stamps.update(transaction.stamps)
        self.version += 1
        transaction.committed = True

    def checkpoint(self, folder: Path) -> None:
        """A consistent copy by hard links where the file system allows; `open_store` opens it like any state directory.

        The manifest is written last: a copy without one was not finished.
        """
        if folder.exists():
            raise UsageError(f"{folder} exists; name a new folder for the checkpoint")
        folder.mkdir(parents=True)
        try:
            Checkpoint(self._db).create_checkpoint(str(folder / DATABASE_FOLDER))
        except Exception as error:
            raise FatalError(f"No checkpoint could be written to {folder}: {error}") from error
        write_manifest(folder, self.manifest)

    def close(self) -> None:
        """Give the database and the lock back. Readers of `rows` end here: stop their threads before."""
        if self._lock is None:
            return
        for rows in list(self._open_rows):
            rows.close()
        self._handles.clear()
        for table in self._tables.values():
            table.close()
        self._tables.clear()
        self._db.close()
        self._lock.release()
        self._lock = None


def _options(config: StateConfig, shares: int) -> Options:
    blocks = BlockBasedOptions()
    blocks.set_block_cache(Cache(max(config.block_cache_bytes_max // shares, _PARTITION_BYTES_MIN)))
    blocks.set_bloom_filter(10, False)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_block_based_table_factory(blocks)
    options.set_db_write_buffer_size(max(config.write_buffer_bytes_max // shares, _PARTITION_BYTES_MIN))
    options.set_compression_type(DBCompressionType.lz4())
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(1 << 20)
    options.set_stats_dump_period_sec(0)
    return options


def _bounds(prefix: bytes) -> ReadOptions:
    """Where a scan of this prefix ends. The bound lets RocksDB stop by itself, three times as fast as looking at each key.

    An iterator borrows the bound's bytes without holding them: keep the options until it is done.
    """
    bounds = ReadOptions()
    stem = prefix.rstrip(b"\xff")
    if stem:
        bounds.set_iterate_upper_bound(stem[:-1] + bytes((stem[-1] + 1,)))
    return bounds


def _sought(family: Rdict, start: bytes, bounds: ReadOptions) -> RdictIter:
    at = family.iter(bounds)
    at.seek(start)
    return at


def _rest(at: RdictIter) -> Iterator[Row]:
    """From here to the bound. An iterator that meets a block it can't read just ends: `status` raises what it met.

    (`Rdict.items` never asks, so a damaged table looks like an empty one.)
    """
    while at.valid():
        yield cast("Row", (at.key(), at.value()))  # raw mode: bytes alone
        at.next()
    at.status()


def _scan(family: Rdict, prefix: bytes) -> list[Row]:
    bounds = _bounds(prefix)
    return list(_rest(_sought(family, prefix, bounds)))


def _read(at: RdictIter, bounds: ReadOptions, after: bytes, folder: Path) -> Generator[Row, None, None]:
    try:
        for key, value in _rest(at):
            if key != after or not after:
                yield key, value
    except Exception as error:
        raise _unreadable(folder, error) from error
    del bounds  # held until here


def _unreadable(folder: Path, error: Exception) -> FatalError:
    """Of an open database: no record is to blame, and none may be dead-lettered for it."""
    return FatalError(f"{_unusable(folder, error)}. Nothing of the batch was committed")


def _unusable(folder: Path, error: Exception) -> SolarisError:
    text = str(error)
    if "No space left" in text:
        return FatalError(f"The disk of the state in {folder} is full ({text}); free it and start again")
    if "lock hold" in text or "/LOCK" in text:
        return StateError(f"The database in {folder} is open elsewhere ({text}); stop that process")
    return StateError(
        f"The state in {folder} can't be read ({text}); move the directory away and start again: "
        "its partition is then folded anew from the log"
    )

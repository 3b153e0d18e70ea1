"""What lies in the state folders of stopped workers: hashes of live rows, and single tables.

In: a worker's state folder, a bundle. Out: hashes and rows. Opens a store as the worker would, with the manifest that it left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from models.bundle import Bundle
from streams.items import ItemIndex
from streams.serve import Serve, ServeConfig
from streams.state.manifest import read_manifest
from streams.state.prune import Rules, state_hash
from streams.state.rocks import RocksStore, open_store
from streams.state.store import Store
from tests.integration.installation import PARTITIONS

SHARED = frozenset(("history", "shown", "item_counters", "user_counters"))
"""Tables that serve and speculate fold from the same events."""


@contextmanager
def stores(folder: Path) -> Iterator[list[RocksStore]]:
    """The stores of all four partitions."""
    opened = [open_store(folder / str(p), read_manifest(folder / str(p))) for p in range(PARTITIONS)]
    try:
        yield opened
    finally:
        for store in opened:
            store.close()


def serve_on(store: Store, partition: int, bundle: Path) -> Serve:
    """Serve's core over a store."""
    parts = _bundle(bundle)
    return Serve(partition, "", parts.ranker, None, parts.space, parts.d, ServeConfig(), store, ItemIndex())


@cache
def _bundle(folder: Path) -> Bundle:
    return Bundle.load(folder, ("ranker",))


def hashes(folder: Path, bundle: Path, now: Sequence[int], tables: Collection[str] | None = None) -> list[str]:
    """For each partition the hash of the rows of these tables (None: all) that are live at its `now`."""
    found = []
    with stores(folder) as opened:
        for partition, store in enumerate(opened):
            serve = serve_on(store, partition, bundle)
            rules: Rules = {
                table: rule for table, rule in serve.tables.rules().items() if tables is None or table in tables
            }
            assert tables is None or rules.keys() == tables
            found.append(state_hash(store, now[partition], rules))
    return found


def clocks(folder: Path, bundle: Path) -> list[int]:
    """Each partition's clock, UTC ms."""
    with stores(folder) as opened:
        return [serve_on(store, partition, bundle).clock.now for partition, store in enumerate(opened)]


def rows(store: Store, table: str) -> dict[bytes, bytes]:
    """A whole table."""
    return dict(store.rows(table))

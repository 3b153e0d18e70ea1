"""A process to be killed: commits batch after batch into a state directory and says how far it is. Run with -m, by the tests.

`hold FOLDER` opens and waits; `write FOLDER` writes until killed; `fill FOLDER BYTES` writes with a limit on the size of files,
which is how a full disk looks to RocksDB, and says which error came.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
from pathlib import Path

from schemas.errors import FatalError
from streams.state.manifest import StateManifest
from streams.state.rocks import RocksStore, StateConfig, open_store
from streams.state.store import Transaction

MANIFEST = StateManifest(0, 7, {})
ROWS = 20


def commit_batch(store: RocksStore, number: int) -> None:
    """Batch `number`: as many rows in each of two tables, and the stamp."""
    txn = Transaction(store)
    for table in ("history", "pairs"):
        for row in range(ROWS):
            txn.put(table, f"{number:08}/{row}".encode(), os.urandom(200))
    txn.stamp("events", number + 1)
    store.commit(txn)


def main(verb: str, folder: str, *more: str) -> None:
    store = open_store(Path(folder), MANIFEST, StateConfig(write_buffer_bytes_max=0))
    begin = store.stamp("events") or 0
    print(begin, flush=True)
    if verb == "hold":
        signal.pause()
    if verb == "fill":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(more[0]), int(more[0])))
    try:
        for number in itertools.count(begin):
            commit_batch(store, number)
            if verb == "write":
                print(number + 1, flush=True)
    except FatalError as error:
        print(f"{store.stamp('events')} {error}", flush=True)
        os._exit(3)  # as a crash would: nothing more is written


if __name__ == "__main__":
    main(*sys.argv[1:])

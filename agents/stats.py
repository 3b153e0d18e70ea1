"""A worker's counts as a JSON file, written anew twice a second: what the demo shows and what a script can read.

In: a function that gives the counts. Out: `{"role", "pid", "ready", "counts"}`, replaced as a whole, so a reader
never sees half of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

INTERVAL_S = 0.5

Gather = Callable[[], tuple[bool, dict[str, Any]]]
"""(ready, counts) of this moment; called where the counts are made, never beside them."""


class StatsFile:
    """Writes to `path` (None: nowhere) from a thread of its own; counts are gathered in the event loop that makes them."""

    def __init__(self, path: Path | None, role: str, gather: Gather) -> None:
        self._path, self._role, self._gather = path, role, gather
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stats", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Begin; with a loop the counts are gathered in it, else `write` is the caller's to call."""
        if self._path is None or self._thread.is_alive():
            return
        self._loop = loop
        if loop is not None:
            self._thread.start()

    def write(self) -> None:
        """Gather and write now."""
        if self._path is None:
            return
        ready, counts = self._gather()
        facts = {"role": self._role, "pid": os.getpid(), "ready": ready, "counts": counts}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        work = self._path.with_suffix(".writing")
        work.write_text(json.dumps(facts))
        work.replace(self._path)

    def close(self) -> None:
        """Write once more and stop."""
        self._stop.set()
        self.write()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            if self._loop is None or self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self.write)

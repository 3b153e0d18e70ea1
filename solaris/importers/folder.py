"""The writing side of a log folder: events, requests and items as lines, `log.json` last.

In: encoded lines in the order of their ts. Out: a folder that `schemas.log.Log` reads. A folder without `log.json` is no
log, so a torn run is never taken for a whole one. Never overwrites a log unless it is told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from schemas.errors import UsageError
from schemas.log import LogManifest

PARTS = ("events", "requests", "items")


class LogFolder:
    """A log folder being written; a context manager that closes its files and removes them when the work failed."""

    def __init__(self, folder: Path, *, force: bool = False) -> None:
        """Raises `UsageError` when `folder` holds something already and `force` is off, or when it can't be made."""
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {folder} is a file; name a folder")
        if folder.is_dir() and any(folder.iterdir()) and not force:
            raise UsageError(f"--out {folder} is not empty; name a new folder, or add --force to replace the log in it")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.json").unlink(missing_ok=True)
        self._files = {part: (folder / f"{part}.jsonl").open("wb") for part in PARTS}
        self.lines = dict.fromkeys(PARTS, 0)

    def write(self, part: str, lines: Sequence[str]) -> None:
        """Append encoded lines (without their line ends) to `part`, one of `PARTS`."""
        if lines:
            self._files[part].write(("\n".join(lines) + "\n").encode())
            self.lines[part] += len(lines)

    def finish(self, manifest: LogManifest) -> LogManifest:
        """Close all parts and make the folder a log; parts without a line are left out."""
        self._close()
        for part, count in self.lines.items():
            if not count:
                (self.folder / f"{part}.jsonl").unlink()
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        (self.folder / "log.json").write_bytes(text + b"\n")
        return manifest

    def __enter__(self) -> LogFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()
        if kind is not None:
            for part in PARTS:
                (self.folder / f"{part}.jsonl").unlink(missing_ok=True)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()

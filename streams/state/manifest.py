"""What a partition's directory says about itself, who holds it, and what happens when it is not what is wanted.

In: a directory and the manifest that the running program needs. Out: a directory that is held by this process alone and fits.
Never: deletes state. What doesn't fit is set aside beside it, and said.

    state/3/manifest.json      the manifest, written before the first row
    state/3/db/                RocksDB
    state/3.lock               held while the partition is open; free as soon as its process is gone, however it went
    state/3.aside-1/           a directory that did not fit
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from schemas.errors import FatalError, StateError

SCHEMA = 3
"""Version of tables and rows. A change that this release can't read raises it, and old directories are folded anew."""

MANIFEST_FILE, DATABASE_FOLDER = "manifest.json", "db"
_LOCK_STEP_MS = 100

_log = logging.getLogger(__name__)


class TopicState(msgspec.Struct, frozen=True):
    """A topic as the stamps know it: Kafka's topic id (a re-created topic has another) and its partition count."""

    id: str
    partitions: int


class StateManifest(msgspec.Struct, frozen=True):
    """What a partition's state rests on. `space`: the embedding space last served; rows name their own, so it may change."""

    partition: int
    space: int
    topics: dict[str, TopicState]
    schema: int = SCHEMA

    def differences(self, wanted: StateManifest) -> list[str]:
        """Why state of this manifest can't be used under `wanted`; empty if it can."""
        found = []
        if self.schema != wanted.schema:
            found.append(f"its schema is {self.schema}, this release writes {wanted.schema}")
        if self.partition != wanted.partition:
            found.append(f"it holds partition {self.partition}, not {wanted.partition}")
        for name in sorted(self.topics.keys() & wanted.topics.keys()):
            old, new = self.topics[name], wanted.topics[name]
            if old.id != new.id:
                found.append(f"{name} was created anew (topic id {old.id}, now {new.id})")
            if old.partitions != new.partitions:
                found.append(f"{name} had {old.partitions} partitions, now {new.partitions}")
        return found


class FolderLock:
    """Exclusive hold on a state directory, by the kernel's lock on a file beside it. Raises `StateError` while another has it."""

    def __init__(self, folder: Path, wait_ms: int, sleep: Callable[[float], None] | None) -> None:
        self.path = folder.with_name(folder.name + ".lock")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StateError(f"The state directory {folder} can't be made or locked: {error.strerror}") from error
        steps = wait_ms // _LOCK_STEP_MS if sleep else 0
        for step in range(steps + 1):
            if self._take():
                return
            if sleep and step < steps:
                sleep(_LOCK_STEP_MS / 1000)
        holder = os.pread(self._file, 32, 0).decode(errors="replace").strip()
        os.close(self._file)
        raise StateError(
            f"The state directory {folder} is in use by process {holder or 'unknown'} (waited {steps * _LOCK_STEP_MS} ms); "
            "stop that process or give this one another directory"
        )

    def _take(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        return True

    def release(self) -> None:
        """Let others have the directory. The file stays: removing it would let two hold it."""
        os.close(self._file)


def fit_folder(folder: Path, wanted: StateManifest) -> Path | None:
    """Make `folder` one that fits `wanted`; returns where the old one was set aside, None if nothing was. Hold the lock."""
    aside = None
    reasons = _misfits(folder, wanted)
    if reasons:
        aside = set_aside(folder, "; ".join(reasons))
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, wanted)
    return aside


def set_aside(folder: Path, reason: str) -> Path:
    """Rename a closed state directory out of the way and say so; the partition is folded anew from the next source."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.aside-{number}")).exists():
        number += 1
    folder.rename(aside)
    _log.error("State directory %s is set aside as %s: %s. Its partition is folded anew.", folder, aside.name, reason)
    return aside


def read_manifest(folder: Path) -> StateManifest:
    """The manifest of a state directory or a checkpoint. Raises `StateError` where there is none that can be read."""
    path = folder / MANIFEST_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=StateManifest)
    except FileNotFoundError:
        raise StateError(f"{folder} has no {MANIFEST_FILE}: it is no complete state directory") from None
    except msgspec.DecodeError as error:
        raise StateError(f"{path} can't be read ({error}): the directory was damaged") from None


def write_manifest(folder: Path, manifest: StateManifest) -> None:
    """Replace the manifest in one step, so that a crash leaves the old one or the new one."""
    path = folder / MANIFEST_FILE
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise FatalError(f"{path} can't be written: {error.strerror}; free the disk and start again") from error


def _misfits(folder: Path, wanted: StateManifest) -> list[str]:
    if not folder.exists() or not any(folder.iterdir()):
        return []
    try:
        return read_manifest(folder).differences(wanted)
    except StateError as error:
        return [str(error)]

"""An event log on disk: what `import` and `generate` write, what `train` and `produce` read.

A log is a folder: `events.jsonl`, `requests.jsonl`, `items.jsonl` (the last two optional) and `log.json`. Lines are the JSON
of the topics, sorted by `ts`; a line of requests also carries its outcomes, which are never sent to a topic.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from schemas.errors import UsageError
from schemas.events import Event, Item
from schemas.ranking import RankingRequest

_T = TypeVar("_T")


class LoggedRequest(RankingRequest, frozen=True, kw_only=True, omit_defaults=True):
    """A request with what came of it: one label a candidate, in order; `labels2`: a second task; `oracle`: true probabilities."""

    labels: list[int]
    labels2: list[int] | None = None
    oracle: list[float] | None = None


class LogManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`log.json`: where the log came from and what is in it. `constructed`: requests were made up from events, not observed."""

    source: str
    events: int
    requests: int
    items: int
    first_ts: int
    last_ts: int
    constructed: bool
    dropped: dict[str, int]
    label: str
    note: str = ""


class Log:
    """Read access to a log folder; iterators stream, so a log of any length fits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = folder / "log.json"
        if not manifest.is_file():
            raise UsageError(
                f"{folder} is no log (it has no log.json); make one with `solaris import` or `solaris generate`"
            )
        self.manifest = msgspec.json.decode(manifest.read_bytes(), type=LogManifest)

    def events(self) -> Iterator[Event]:
        """Events in the order of their ts."""
        return _lines(self.folder / "events.jsonl", Event)

    def requests(self) -> Iterator[LoggedRequest]:
        """Requests with their outcomes, in the order of their ts; empty where the log has none."""
        return _lines(self.folder / "requests.jsonl", LoggedRequest)

    def items(self) -> Iterator[Item]:
        """The catalogue; empty where the log has none. Items with `ts` appear at that time."""
        return _lines(self.folder / "items.jsonl", Item)


Line = Event | LoggedRequest
"""What happens in a log."""


def merge(events: Iterable[Event], requests: Iterable[LoggedRequest]) -> Iterator[tuple[int, Line]]:
    """(ts, line) of both in the order of `ts`; at equal times requests go first, then the order of the files."""
    rows: list[Iterator[tuple[int, int, int, Line]]] = [
        ((int(line.ts or 0), 0, number, line) for number, line in enumerate(requests)),
        ((int(line.ts or 0), 1, number, line) for number, line in enumerate(events)),
    ]
    for ts, _kind, _number, line in heapq.merge(*rows, key=lambda row: row[:3]):
        yield ts, line


def _lines(path: Path, kind: type[_T]) -> Iterator[_T]:
    if not path.is_file():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise UsageError(f"{path}, line {number}: {error}; make the log again with `solaris import`") from None

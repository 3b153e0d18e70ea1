"""OTTO's session log: one JSON object a line, `{"session": 0, "events": [{"aid": 1, "ts": 1659304800025, "type": "clicks"}]}`.

In: the file, also gzipped. Out: rows, a session being a user (clicks → click, carts → cart, orders → buy). A bad event is
dropped alone; the rest of its session stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from solaris.importers.lines import Progress, lines
from solaris.importers.rows import Rows

TYPES = {"clicks": b"click", "carts": b"cart", "orders": b"buy"}


class _Event(msgspec.Struct, gc=False):
    aid: int | str
    ts: int
    type: str


class _Session(msgspec.Struct):
    session: int | str
    events: list[_Event]


class _Loose(msgspec.Struct):
    session: int | str
    events: list[msgspec.Raw]


_session = msgspec.json.Decoder(_Session)
_loose = msgspec.json.Decoder(_Loose)
_event = msgspec.json.Decoder(_Event)


def sniff(path: Path, start: bytes) -> bool:
    """Whether the first line is a session (or the start of one that is longer than `start`)."""
    line = start.partition(b"\n")[0]
    return (
        path.is_file() and line.startswith(b"{") and b'"session"' in line and b'"events"' in line and b'"aid"' in line
    )


def read(path: Path, rows: Rows, progress: Progress) -> None:
    """Add every good event; count every other one by reason."""
    for line in lines(path, rows, progress):
        if not line.strip():
            continue
        try:
            session = _decode(line, rows)
        except msgspec.ValidationError:
            rows.drop("not_a_session")
            continue
        except (msgspec.DecodeError, UnicodeDecodeError):
            rows.drop("not_json" if line.endswith(b"\n") else "last_line_cut")
            continue
        user = _text(session.session)
        for event in session.events:
            event_type = TYPES.get(event.type)
            if event_type is None:
                rows.drop("unknown_type")
            else:
                rows.add(user, _text(event.aid), event_type, event.ts)


def _decode(line: bytes, rows: Rows) -> _Session:
    try:
        return _session.decode(line)
    except msgspec.ValidationError:
        loose = _loose.decode(line)
        return _Session(loose.session, list(_good(loose.events, rows)))


def _good(events: list[msgspec.Raw], rows: Rows) -> Iterator[_Event]:
    for raw in events:
        try:
            yield _event.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            rows.drop("not_an_event")


def _text(value: int | str) -> bytes:
    return str(value).encode(errors="surrogateescape")

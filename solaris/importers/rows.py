"""Rows on their way into a log: validated, interned into columns of integers, sorted once by (ts, row).

In: ids and types as UTF-8 bytes, times in ms, one row at a time. Out: `Columns`, about 20 bytes a row, with every refused row
counted by reason. Never raises for a bad row and never keeps one.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import BadRecord
from schemas.events import valid_ts, valid_type
from schemas.keys import valid_id
from solaris.importers.folder import LogFolder

CHUNK_ROWS = 50_000
KINDS_MAX = 1 << 16
"""Distinct event types that a column of 16 bits can tell apart."""
_NO_LATEST_MS = 1 << 62  # an old log is never "ahead of its append time"

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Names:
    """Distinct names → dense codes in the order of arrival."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.codes: dict[bytes, int] = {}

    def code(self, name: bytes) -> int:
        """Code of a valid name; raises `BadRecord` with the reason."""
        code = self.codes.get(name)
        return self._new(name) if code is None else code

    def _new(self, name: bytes) -> int:
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise BadRecord("not_utf8", f"{self.field} is not UTF-8") from None
        if self.field == "event_type":
            valid_type(text)
        else:
            valid_id(text, self.field)
        return self.codes.setdefault(name, len(self.codes))

    def texts(self) -> list[str]:
        """All names by code."""
        return [name.decode() for name in self.codes]

    def quoted(self) -> list[str]:
        """All names by code, as JSON strings."""
        return [msgspec.json.encode(name).decode() for name in self.texts()]


@dataclass(frozen=True)
class Columns:
    """`n` events sorted by (ts, row): codes [n] into the name tables, ts [n] in UTC ms; request -1 = none."""

    user: Int32
    item: Int32
    kind: npt.NDArray[np.uint16]
    request: Int32
    ts: Int64
    category: Int32  # [items], -1 = unknown
    users: Names
    items: Names
    kinds: Names
    requests: Names
    categories: Names

    def __len__(self) -> int:
        return len(self.ts)

    def kind_mask(self, names: frozenset[str]) -> npt.NDArray[np.bool_]:
        """Which events [n] are of one of these types."""
        return np.array([text in names for text in self.kinds.texts()], bool)[self.kind]


class Rows:
    """The growing columns; `dropped` counts refused rows by reason."""

    def __init__(self) -> None:
        self.users, self.items, self.kinds = Names("user_id"), Names("item_id"), Names("event_type")
        self.requests, self.categories = Names("request_id"), Names("category")
        self._user, self._item, self._kind = array("i"), array("i"), array("H")
        self._request, self._ts, self._category = array("i"), array("q"), array("i")
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._ts)

    def drop(self, reason: str) -> None:
        self.dropped[reason] += 1

    def add(self, user: bytes, item: bytes, kind: bytes, ts: int, category: bytes = b"", request: bytes = b"") -> None:
        """Take one row, or count why not. A later category of an item replaces the earlier one."""
        try:
            valid_ts(ts, _NO_LATEST_MS)
            codes = self.users.code(user), self.items.code(item), self.kinds.code(kind)
            category_code = self.categories.code(category) if category else -1
            request_code = self.requests.code(request) if request else -1
            if codes[2] >= KINDS_MAX:
                raise BadRecord(
                    "too_many_event_types", f"more than {KINDS_MAX} event types; is the right column mapped?"
                )
        except BadRecord as error:
            self.dropped[error.reason] += 1
            return
        self._user.append(codes[0])
        self._item.append(codes[1])
        self._kind.append(codes[2])
        self._request.append(request_code)
        self._ts.append(ts)
        self._set_category(codes[1], category_code)

    def describe(self, item: bytes, category: bytes) -> None:
        """Take an item's category from a catalogue, whether or not an event names the item."""
        try:
            self._set_category(self.items.code(item), self.categories.code(category))
        except BadRecord as error:
            self.dropped["item_" + error.reason] += 1

    def _set_category(self, item: int, category: int) -> None:
        while len(self._category) <= item:
            self._category.append(-1)
        if category >= 0:
            self._category[item] = category

    def columns(self) -> Columns:
        """Sort by (ts, row) and hand over; this object is empty afterwards."""
        category = np.full(len(self.items.codes), -1, np.int32)
        category[: len(self._category)] = np.frombuffer(self._category, np.int32)
        ts = np.frombuffer(self._ts, np.int64)
        order = np.argsort(ts, kind="stable")
        columns = Columns(
            user=np.frombuffer(self._user, np.int32)[order],
            item=np.frombuffer(self._item, np.int32)[order],
            kind=np.frombuffer(self._kind, np.uint16)[order],
            request=np.frombuffer(self._request, np.int32)[order],
            ts=ts[order],
            category=category,
            users=self.users,
            items=self.items,
            kinds=self.kinds,
            requests=self.requests,
            categories=self.categories,
        )
        self._user, self._item, self._kind = array("i"), array("i"), array("H")
        self._request, self._ts, self._category = array("i"), array("q"), array("i")
        return columns


def write_events(columns: Columns, out: LogFolder) -> Iterator[int]:
    """Write all events as lines, with event ids by place; yields the rows written so far."""
    users, items, kinds = columns.users.quoted(), columns.items.quoted(), columns.kinds.quoted()
    requests = [f',"request_id":{name}' for name in columns.requests.quoted()] + [""]  # -1 is the last
    for start in range(0, len(columns), CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        rows = zip(
            columns.user[part].tolist(),
            columns.item[part].tolist(),
            columns.kind[part].tolist(),
            columns.ts[part].tolist(),
            columns.request[part].tolist(),
            strict=True,
        )
        lines = [
            f'{{"user_id":{users[user]},"item_id":{items[item]},"event_type":{kinds[kind]},"ts":{ts}'
            f'{requests[request]},"event_id":"e{number}"}}'
            for number, (user, item, kind, ts, request) in enumerate(rows, start=start)
        ]
        out.write("events", lines)
        yield start + len(lines)


def write_items(columns: Columns, out: LogFolder, *, known: bool) -> None:
    """Write the catalogue. `known`: items were there all along; else an item appears with its first event."""
    items, categories = columns.items.quoted(), columns.categories.quoted()
    first = np.full(len(items), np.iinfo(np.int64).max)
    np.minimum.at(first, columns.item, columns.ts)
    order = np.arange(len(items)) if known else np.argsort(first, kind="stable")
    for start in range(0, len(order), CHUNK_ROWS):
        lines = []
        for item in order[start : start + CHUNK_ROWS].tolist():
            category = f',"category":{categories[columns.category[item]]}' if columns.category[item] >= 0 else ""
            when = "" if known else f',"ts":{first[item]}'
            if known or first[item] <= columns.ts[-1]:  # an item without an event has no time to appear at
                lines.append(f'{{"item_id":{items[item]}{category}{when}}}')
        out.write("items", lines)

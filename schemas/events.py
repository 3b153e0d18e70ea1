"""User events and catalogue items: what producers send as JSON, and the columns that the core folds.

In: the bytes of one record batch and their append times. Out: an `EventBatch` of columns, and the refused records with reasons.
Never drops a record in silence: every index of the input is in one of the two.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import BadRecord
from schemas.keys import valid_id

AHEAD_MS_MAX = 5 * 60_000
"""A `ts` further ahead of its record's append time than this is quarantined and moves no clock."""

_SECONDS_BELOW = 100_000_000_000  # 1973 in ms, the year 5138 in seconds
_MICROS_ABOVE = 100_000_000_000_000  # the year 5138 in ms, 1973 in micro-seconds
EVENT_TYPE_BYTES_MAX = 64
CONTENT_MAX = 256

KNOWN_TYPES = ("impression", "view", "click", "cart", "favorite", "buy", "rating", "like", "dislike", "share", "search")
"""Event types with a code of their own (1..); any other type hashes into codes 32..255."""

POSITIVE_TYPES = frozenset({"click", "cart", "favorite", "buy", "rating", "like", "share"})
"""Types that count as a positive outcome in the fresh item counters."""

_TYPE_CODES = {name: code for code, name in enumerate(KNOWN_TYPES, start=1)}


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One user activity event on `solaris.events`, keyed by user id.

    `ts` is event time in UTC milliseconds; when missing, the record's append time is taken. Unknown fields are ignored,
    so a producer may add its own.
    """

    user_id: str | int
    item_id: str | int
    event_type: str
    ts: int | None = None
    event_id: str | None = None
    request_id: str | None = None


class Item(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One catalogue item on `solaris.items` (compacted, keyed by item id; a null value withdraws the item)."""

    item_id: str | int
    category: str | int | None = None
    content: list[float] | None = None
    ts: int | None = None


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Valid events of one partition as parallel columns, in offset order; `append_ms` is the Kafka record's time."""

    partition: int
    offsets: npt.NDArray[np.int64]
    ts: npt.NDArray[np.int64]
    append_ms: npt.NDArray[np.int64]
    users: list[str]
    items: list[str]
    types: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.users)

    def take(self, rows: Sequence[int]) -> EventBatch:
        """The events at these row numbers, in their order."""
        at = np.asarray(rows, np.int64)
        return EventBatch(
            self.partition,
            self.offsets[at],
            self.ts[at],
            self.append_ms[at],
            [self.users[row] for row in rows],
            [self.items[row] for row in rows],
            self.types[at],
        )


Refused = list[tuple[int, BadRecord]]
"""Refused records of a batch: (index in the batch, why)."""

_event_decoder = msgspec.json.Decoder(Event)
_item_decoder = msgspec.json.Decoder(Item)


def type_code(event_type: str) -> int:
    """Code 1..255 of an event type; stable across releases because the table only grows below 32."""
    return _TYPE_CODES.get(event_type) or 32 + zlib.crc32(event_type.encode()) % 224


POSITIVE_CODES = frozenset(type_code(name) for name in POSITIVE_TYPES)
IMPRESSION_CODE = type_code("impression")


def valid_ts(ts: int | None, append_ms: int) -> int:
    """Event time in UTC ms. Raises `BadRecord` for anything that is not plausibly milliseconds (DESIGN §2)."""
    if ts is None:
        return append_ms
    if ts <= 0:
        raise BadRecord("ts_not_positive", f"ts is {ts}; send UTC milliseconds since 1970")
    if ts < _SECONDS_BELOW:
        raise BadRecord("ts_seconds", f"ts is {ts}, which looks like seconds; send milliseconds ({ts * 1000})")
    if ts > _MICROS_ABOVE:
        raise BadRecord("ts_micros", f"ts is {ts}, which looks like micro- or nanoseconds; send milliseconds")
    if ts > append_ms + AHEAD_MS_MAX:
        raise BadRecord("ts_future", f"ts {ts} is {ts - append_ms} ms ahead of the record's append time {append_ms}")
    return ts


_T = TypeVar("_T")


def decode_json(decoder: msgspec.json.Decoder[_T], value: bytes | None) -> _T:
    """Strict JSON decode that turns every failure into a `BadRecord` with the reason."""
    if not value:
        raise BadRecord("empty", "the value is null or empty; send one JSON object")
    try:
        return decoder.decode(value)
    except msgspec.ValidationError as error:
        reason = "ts_type" if str(error).endswith("`$.ts`") else "shape"
        raise BadRecord(reason, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRecord("json", str(error)) from None
    except RecursionError:
        raise BadRecord("json", "nested too deeply") from None


def check_key(key: bytes | None, user: str) -> None:
    """The record's key must be the user id: partitioning and order hang on it. Raises `BadRecord` (`key`)."""
    if key != user.encode():
        raise BadRecord("key", f"the record's key is {key!r} but user_id is {user!r}; key records by user id")


def decode_event(key: bytes | None, value: bytes | None, append_ms: int) -> tuple[str, str, int, int]:
    """(user, item, type code, ts) of one valid record; raises `BadRecord`."""
    event = decode_json(_event_decoder, value)
    user, item = valid_id(event.user_id, "user_id"), valid_id(event.item_id, "item_id")
    check_key(key, user)
    return user, item, valid_type(event.event_type), valid_ts(event.ts, append_ms)


def valid_type(event_type: str) -> int:
    """Code of a valid event type. Types that begin with `$` are reserved for control records."""
    if not event_type or len(event_type) > EVENT_TYPE_BYTES_MAX or event_type[0] == "$":
        raise BadRecord("event_type", f"event_type {event_type[:70]!r} is empty, too long or reserved (`$`)")
    try:
        return type_code(event_type)
    except UnicodeEncodeError:
        raise BadRecord("event_type", "event_type holds a lone surrogate") from None


def decode_events(
    partition: int,
    offsets: Sequence[int],
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
    append_ms: Sequence[int],
) -> tuple[EventBatch, Refused]:
    """Decode one record batch; every index is either a row of the batch or in the refused list."""
    users: list[str] = []
    items: list[str] = []
    kept: list[tuple[int, int, int, int]] = []
    refused: Refused = []
    for index, (offset, key, value, append) in enumerate(zip(offsets, keys, values, append_ms, strict=True)):
        try:
            user, item, code, ts = decode_event(key, value, int(append))
        except BadRecord as error:
            refused.append((index, error))
            continue
        users.append(user)
        items.append(item)
        kept.append((offset, ts, append, code))
    columns = np.asarray(kept, np.int64).reshape(-1, 4)
    batch = EventBatch(
        partition, columns[:, 0], columns[:, 1], columns[:, 2], users, items, columns[:, 3].astype(np.uint8)
    )
    return batch, refused


def decode_item(key: bytes | None, value: bytes | None) -> tuple[str, Item | None]:
    """(item id, item), or (item id, None) for a withdrawn item (null value). Raises `BadRecord`."""
    if value is None:
        if not key:
            raise BadRecord("key", "a withdrawn item needs its id as the record's key")
        try:
            return valid_id(key.decode(), "key"), None
        except UnicodeDecodeError:
            raise BadRecord("key", "the record's key is not UTF-8") from None
    item = decode_json(_item_decoder, value)
    name = valid_id(item.item_id, "item_id")
    if key != name.encode():
        raise BadRecord("key", f"the record's key is {key!r} but item_id is {name!r}; key records by item id")
    if item.category is not None:
        valid_id(item.category, "category")
    if item.content is not None and (len(item.content) > CONTENT_MAX or not all(map(math.isfinite, item.content))):
        raise BadRecord("content", f"content must be at most {CONTENT_MAX} finite numbers")
    return name, item


def encode_event(event: Event) -> bytes:
    """JSON of one event, missing fields left out."""
    return msgspec.json.encode(event)


def encode_item(item: Item) -> bytes:
    """JSON of one item, missing fields left out."""
    return msgspec.json.encode(item)

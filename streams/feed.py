"""A log cut into slices of event time: what the pipeline steps through, with offsets as they would stand on the topics.

In: events and requests in the order of their `ts`. Out: slices of columns per partition. Looks at no record of a later slice.

A slice ends after `slice_ms`, and also before a request of a user who has an event in it: so a request always sees all of its
own user's earlier events, and nothing that is not earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from schemas.events import Event, EventBatch, type_code
from schemas.keys import partition_of
from schemas.log import LoggedRequest, merge
from schemas.ranking import CheckedRequest


@dataclass(slots=True)
class PartitionSlice:
    """One partition's share of a slice. `logged` runs parallel to `requests` and holds the outcomes."""

    events: EventBatch
    next_event: int
    requests: list[CheckedRequest]
    logged: list[LoggedRequest]


@dataclass(slots=True)
class Slice:
    """Records of [first_ts, last_ts], by partition; partitions without a record are left out."""

    first_ts: int
    last_ts: int
    partitions: dict[int, PartitionSlice]


@dataclass
class _Open:
    """A slice that is being filled."""

    first_ts: int
    last_ts: int = 0
    users: set[str] = field(default_factory=set)
    events: dict[int, list[tuple[int, int, str, str, int]]] = field(default_factory=dict)
    requests: dict[int, list[tuple[CheckedRequest, LoggedRequest]]] = field(default_factory=dict)


class Feed:
    """Cuts a log for `partitions` partitions; iterate over `slices`."""

    def __init__(self, partitions: int, slice_ms: int) -> None:
        self._partitions, self._slice_ms = partitions, slice_ms
        self._next_event = [0] * partitions
        self._next_request = [0] * partitions
        self._partition_of: dict[str, int] = {}

    def slices(self, events: Iterable[Event], requests: Iterable[LoggedRequest]) -> Iterator[Slice]:
        """Slices in order; equal times: the request goes first."""
        current: _Open | None = None
        for ts, record in merge(events, requests):
            user = str(record.user_id)
            if current is not None and self._closes(current, ts, user, record):
                yield self._closed(current)
                current = None
            current = current or _Open(ts)
            current.last_ts = ts
            self._add(current, ts, user, record)
        if current is not None:
            yield self._closed(current)

    def _closes(self, current: _Open, ts: int, user: str, record: Event | LoggedRequest) -> bool:
        return ts - current.first_ts >= self._slice_ms or (isinstance(record, LoggedRequest) and user in current.users)

    def _add(self, current: _Open, ts: int, user: str, record: Event | LoggedRequest) -> None:
        partition = self._partition(user)
        if isinstance(record, LoggedRequest):
            offset = self._next_request[partition]
            self._next_request[partition] += 1
            unique = list(dict.fromkeys(str(item) for item in record.candidates))
            checked = CheckedRequest(
                str(record.request_id), user, unique, ts, ts, record.deadline_ms, len(unique) != len(record.candidates), offset
            )  # fmt: skip
            current.requests.setdefault(partition, []).append((checked, record))
        else:
            offset = self._next_event[partition]
            self._next_event[partition] += 1
            current.users.add(user)
            row = (offset, ts, user, str(record.item_id), type_code(record.event_type))
            current.events.setdefault(partition, []).append(row)

    def _partition(self, user: str) -> int:
        found = self._partition_of.get(user)
        if found is None:
            found = self._partition_of[user] = partition_of(user, self._partitions)
        return found

    def _closed(self, current: _Open) -> Slice:
        touched = sorted(current.events.keys() | current.requests.keys())
        shares = {}
        for partition in touched:
            rows = current.events.get(partition, [])
            pairs = current.requests.get(partition, [])
            shares[partition] = PartitionSlice(
                _columns(partition, rows),
                rows[-1][0] + 1 if rows else self._next_event[partition],
                [checked for checked, _logged in pairs],
                [logged for _checked, logged in pairs],
            )
        return Slice(current.first_ts, current.last_ts, shares)


def _columns(partition: int, rows: list[tuple[int, int, str, str, int]]) -> EventBatch:
    ts = np.fromiter((row[1] for row in rows), np.int64, len(rows))
    return EventBatch(
        partition,
        np.fromiter((row[0] for row in rows), np.int64, len(rows)),
        ts,
        ts,
        [row[2] for row in rows],
        [row[3] for row in rows],
        np.fromiter((row[4] for row in rows), np.uint8, len(rows)),
    )

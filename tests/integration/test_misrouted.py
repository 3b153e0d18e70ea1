"""A producer that hashes keys another way than Java's: its records are sent on, and all comes out as if they had lain right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Producer

from agents.shell import origin
from schemas.events import Event, EventBatch, encode_event, type_code
from schemas.keys import partition_of
from schemas.ranking import RankingRequest, encode_request
from schemas.topics import EVENTS, RANKING_REQUESTS
from streams.history import History
from streams.state.memory import MemoryStore
from streams.state.store import Store
from tests.integration import state
from tests.integration.fleet import until
from tests.integration.installation import PARTITIONS, Installation

USERS = [f"user-{number}" for number in range(60)]
EVENTS_PER_USER = 20
START_MS = 1_767_225_600_000

pytestmark = pytest.mark.timeout(150)


def test_records_on_the_wrong_partition_take_a_detour_once(install: Callable[..., Installation]) -> None:
    here = install()
    speculate, serve = here.start("speculate", "serve")
    crc32 = Producer(here.client | {"partitioner": "consistent_random", "linger.ms": 1})
    events = [
        Event(
            user, f"i{(number * 7 + place) % 40}", "click" if place % 3 else "view", START_MS + 1_000 * number + place
        )
        for number in range(EVENTS_PER_USER)
        for place, user in enumerate(USERS)
    ]
    half = len(events) // 2
    for event in events[:half]:
        here.send(EVENTS, str(event.user_id).encode(), encode_event(event), producer=crc32)
    here.flush(crc32)
    until(lambda: here.end(EVENTS) > half, 30, "detours")
    speculate.kill()  # in the middle: what it had sent on and not committed is sent on again
    for event in events[half:]:
        here.send(EVENTS, str(event.user_id).encode(), encode_event(event), producer=crc32)
    here.flush(crc32)
    (speculate,) = here.start("speculate")
    here.settle()

    asked = [RankingRequest("r", user, [f"i{n}" for n in range(10)], START_MS + 100_000) for user in USERS]
    for request in asked:
        here.send(RANKING_REQUESTS, str(request.user_id).encode(), encode_request(request), producer=crc32)
    here.flush(crc32)
    here.settle()
    results = here.results()
    assert {user for user, _ in results} == set(USERS)
    for (user, _), result in results.items():
        assert result.basis.partition == partition_of(user, PARTITIONS)
    _assert_each_was_sent_on(here, len(events))
    assert serve.stop() == 0
    assert serve.counts["strayed_ranking-requests"] > 0
    assert serve.counts["strayed_events"] > 0
    assert here.dead_letters() == []
    assert speculate.stop() == 0
    for worker in (serve, speculate):
        _assert_tables(worker.state, here.bundle, events)


def _assert_each_was_sent_on(here: Installation, events: int) -> None:
    """Every stray lies once more, with its origin, where it belongs; after the kill some may lie there twice."""
    strays, detours = set(), Counter[tuple[int, int]]()
    for message in here.read(EVENTS):
        user = (message.key() or b"").decode()
        headers: Any = message.headers() or ()  # its type is drawn too wide
        first = origin(tuple(headers))
        if first is not None:
            detours[first] += 1
            assert message.partition() == partition_of(user, PARTITIONS)
        elif message.partition() != partition_of(user, PARTITIONS):
            strays.add((message.partition() or 0, message.offset() or 0))
    assert len(strays) > events // 2
    assert detours.keys() == strays


def _assert_tables(folder: Path, bundle: Path, events: list[Event]) -> None:
    """The rows of a run in which each event lay on its right partition from the start, and once."""
    with state.stores(folder) as stores:
        for partition, store in enumerate(stores):
            wanted = MemoryStore()
            mine = [event for event in events if partition_of(str(event.user_id), PARTITIONS) == partition]
            core = state.serve_on(wanted, partition, bundle)
            core.events(_columns(partition, mine), len(mine))
            for table in ("item_counters", "user_counters"):
                assert state.rows(store, table) == state.rows(wanted, table), (folder, partition, table)
            assert state.rows(store, "item_counters")
            users = sorted({str(event.user_id) for event in mine})
            assert _histories(store, users) == _histories(wanted, users)


def _histories(store: Store, users: list[str]) -> list[list[tuple[int, str]]]:
    """Histories without the offsets, which differ."""
    rows = History("history", 100, impressions=False).read(store, users)
    return [sorted(zip(row.ts.tolist(), row.items, strict=True)) for row in rows]


def _columns(partition: int, events: list[Event]) -> EventBatch:
    ts = np.array([event.ts for event in events], np.int64)
    return EventBatch(
        partition, np.arange(len(events)), ts, ts, [str(event.user_id) for event in events],
        [str(event.item_id) for event in events], np.array([type_code(event.event_type) for event in events], np.uint8),
    )  # fmt: skip

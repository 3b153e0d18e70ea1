"""Bad records on every topic, each followed by a good one: good ones handled, bad ones on dead-letters once, with the reason."""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from models.bundle import Bundle
from schemas.events import Event, Item, encode_event, encode_item
from schemas.inference import Embeddings, FmRequest, encode_embeddings, encode_fm_request
from schemas.ranking import CANDIDATES_MAX, RankingRequest, encode_request
from schemas.topics import EMBEDDINGS, EVENTS, FM_REQUESTS, ITEMS, RANKED_RESULTS, RANKING_REQUESTS, TopicSpec
from streams.history import History
from tests.integration import state
from tests.integration.fleet import until
from tests.integration.installation import ROLES, Installation, users_by_partition

pytestmark = pytest.mark.timeout(180)

USER = "good"
LONG = "x" * 257


@dataclass(frozen=True)
class Bad:
    """A record that must be refused with `reason`."""

    reason: str
    key: bytes | None
    value: bytes | None


def test_bad_records_become_dead_letters_and_the_good_ones_between_are_handled(
    install: Callable[..., Installation],
) -> None:
    here = install()
    workers = here.start(*ROLES)
    space = Bundle.load(here.bundle, ("ranker",)).space
    wanted: dict[tuple[str, int, int], Bad] = {}
    good: Counter[str] = Counter()
    now = int(time.time() * 1000)
    partition = next(number for number, users in users_by_partition([USER]).items() if users)
    for topic, bads, follower in _cases(now, space):
        records = [pair for number, bad in enumerate(bads) for pair in ((bad.key, bad.value), follower(number))]
        offsets = here.place(topic, records, partition)
        name = here.kafka.topic(topic)
        wanted |= {(name, partition, offset): bad for offset, bad in zip(offsets[::2], bads, strict=True)}
        good[topic.name] = len(bads)
    here.settle()
    until(
        lambda: len(here.dead_letters()) >= len(wanted),
        20,
        lambda: f"{len(here.dead_letters())} of {len(wanted)} letters",
    )

    letters = here.dead_letters()
    found = Counter((letter.topic, letter.partition, letter.offset) for letter in letters)
    assert found == Counter(wanted.keys())
    for letter in letters:
        bad = wanted[letter.topic, letter.partition, letter.offset]
        assert letter.reason == bad.reason, (letter, bad)
        assert (_bytes(letter.key), _bytes(letter.value)) == (bad.key, bad.value)
        assert letter.sentence

    _assert_good_ones_handled(here, good)
    assert all(worker.alive for worker in workers)
    assert here.lag() == 0
    assert [worker.stop() for worker in workers] == [0, 0, 0]
    _assert_history(here, good[EVENTS.name])
    _restarted_workers_write_no_letter_again(here, len(letters))


def _cases(now: int, space: int) -> Iterator[tuple[TopicSpec, list[Bad], Callable[[int], tuple[bytes, bytes]]]]:
    yield EVENTS, list(_bad_events(now)), _good_event
    yield RANKING_REQUESTS, list(_bad_requests(now)), _good_request
    yield ITEMS, list(_bad_items()), lambda n: (b"i%d" % n, encode_item(Item(f"i{n}", category="c")))
    yield (
        FM_REQUESTS,
        list(_bad_inner(encode_fm_request(_fm_request(0, space)))),
        lambda n: (
            USER.encode(),
            encode_fm_request(_fm_request(n, space)),
        ),
    )
    yield (
        EMBEDDINGS,
        [*_bad_inner(encode_embeddings(_vectors(0, space))), *_bad_vectors(space)],
        lambda n: (
            USER.encode(),
            encode_embeddings(_vectors(n, space)),
        ),
    )
    other = Bad("key", b"another", _good_result(99)[1])
    yield RANKED_RESULTS, [*_bad_json(USER), other], _good_result


def _bad_json(key: str, text: str = "user_id") -> Iterator[Bad]:
    """Of a topic in JSON whose objects have a field `text`."""
    name = key.encode()
    yield Bad("empty", name, b"")
    yield Bad("empty", name, None)
    yield Bad("json", name, b"{")
    yield Bad("json", name, b'{"%s":"\xff\xfe"}' % text.encode())
    yield Bad("json", name, b'{"deep":' + b"[" * 100_000)
    yield Bad("shape", name, b"[]")
    yield Bad("shape", name, b"null")
    yield Bad("shape", name, b"7")
    yield Bad("shape", name, b"{}")


def _bad_events(now: int) -> Iterator[Bad]:
    yield from _bad_json(USER)

    def event(reason: str, key: bytes | None = USER.encode(), **changed: object) -> Bad:
        plain = {"user_id": USER, "item_id": "i", "event_type": "click", "ts": now} | changed
        return Bad(reason, key, json.dumps(plain).encode())

    yield event("shape", user_id=[1])
    yield event("shape", event_type=7)
    yield event("shape", item_id=1.5)
    yield event("key", key=b"another")
    yield event("key", key=None)
    yield event("ts_seconds", ts=now // 1000)
    yield event("ts_micros", ts=now * 1000)
    yield event("ts_type", ts="2026-01-01T00:00:00Z")
    yield event("ts_type", ts=now + 0.5)
    yield event("ts_not_positive", ts=0)
    yield event("ts_not_positive", ts=-1)
    yield event("ts_future", ts=now + 3_600_000)
    yield event("id_long", item_id=LONG)
    yield event("id_long", key=LONG.encode(), user_id=LONG)
    yield event("id_empty", item_id="")
    yield event("json", item_id="\ud800")
    yield event("event_type", event_type="$forget")


def _bad_requests(now: int) -> Iterator[Bad]:
    yield from _bad_json(USER)

    def request(reason: str, key: bytes | None = USER.encode(), **changed: object) -> Bad:
        plain = {"request_id": "bad", "user_id": USER, "candidates": ["i"], "ts": now} | changed
        return Bad(reason, key, json.dumps(plain).encode())

    yield request("shape", candidates=None)
    yield request("shape", candidates="i")
    yield request("shape", deadline_ms="soon")
    yield request("key", key=b"another")
    yield request("key", key=None)
    yield request("candidates", candidates=[f"i{n}" for n in range(CANDIDATES_MAX + 1)])
    yield request("id_long", candidates=["i", LONG])
    yield request("id_empty", candidates=["i", ""])
    yield request("json", candidates=["\udfff"])
    yield request("request_id", request_id="")
    yield request("request_id", request_id=LONG)
    yield request("ts_seconds", ts=now // 1000)
    yield request("ts_micros", ts=now * 1000)
    yield request("ts_type", ts="now")
    yield request("ts_not_positive", ts=0)
    yield request("ts_not_positive", ts=-1)
    yield request("ts_future", ts=now + 3_600_000)


def _bad_items() -> Iterator[Bad]:
    yield from (bad for bad in _bad_json("i", "item_id") if bad.value is not None)  # a null value withdraws an item
    yield Bad("key", b"\xff", None)  # without a key the broker itself refuses it: the topic is compacted
    yield Bad("id_long", LONG.encode(), json.dumps({"item_id": LONG}).encode())
    yield Bad("id_empty", b"i", json.dumps({"item_id": ""}).encode())
    yield Bad("json", b"i", json.dumps({"item_id": "\ud800"}).encode())
    yield Bad("key", b"another", json.dumps({"item_id": "i"}).encode())
    yield Bad("shape", b"i", json.dumps({"item_id": "i", "content": "x"}).encode())
    yield Bad("content", b"i", json.dumps({"item_id": "i", "content": [0.0] * 300}).encode())


def _bad_inner(good: bytes) -> Iterator[Bad]:
    """Of a topic in a fixed layout: `good` is a record that would be taken."""
    key = USER.encode()
    yield Bad("empty", key, b"")
    yield Bad("empty", key, None)
    yield Bad("magic", key, b"{")
    yield Bad("magic", key, b"[]")
    yield Bad("magic", key, b"\xff" * 100)
    yield Bad("version", key, good[:4] + b"\x09" + good[5:])
    yield Bad("length", key, good[:-1])
    yield Bad("length", key, good + b"\x00")
    yield Bad("length", key, good[:6])
    yield Bad("length", key, good[:-1] + b"\xff")
    yield Bad("key", b"another", good)
    yield Bad("key", None, good)


def _bad_vectors(space: int) -> Iterator[Bad]:
    plain = _vectors(0, space)
    for scale, code in ((np.nan, 1), (0.0, 1), (-1.0, 1), (1.0, 0)):
        codes = np.full_like(plain.codes, code)
        scales = np.full_like(plain.scales, scale)
        bad = Embeddings(USER, space, plain.as_of, 0, plain.items, scales, codes)
        yield Bad("vector", USER.encode(), encode_embeddings(bad))


def _good_event(number: int) -> tuple[bytes, bytes]:
    return USER.encode(), encode_event(Event(USER, f"e{number}", "click"))  # without a ts: the record's time counts


def _good_request(number: int) -> tuple[bytes, bytes]:
    request = RankingRequest(f"r{number}", USER, [f"i{number}", "i1", f"i{number}", 7])
    return USER.encode(), encode_request(request)


def _fm_request(number: int, space: int) -> FmRequest:
    one, none = np.ones(1, np.float32), np.zeros(0, np.int64)
    as_of = 1_700_000_000_000 + number
    sources = np.zeros(1, np.uint8)
    return FmRequest(
        USER, space, as_of, 600_000, 0, 0, [f"f{number}"], one, one, sources, [], none.astype(np.uint8), none
    )


def _vectors(number: int, space: int) -> Embeddings:
    return Embeddings(
        USER, space, 1_700_000_000_000 + number, 0, [f"v{number}"], np.ones(1, np.float32), np.ones((1, 8), np.int8)
    )


def _good_result(number: int) -> tuple[bytes, bytes]:
    basis = {"partition": 0, "request_offset": 0, "events": 0, "embeddings": 0, "items": 0, "bundle": "", "config": ""}
    plain = {
        "request_id": f"copy{number}",
        "user_id": USER,
        "ts": 1_700_000_000_000,
        "items": [],
        "flags": [],
        "basis": basis,
    }
    return USER.encode(), json.dumps(plain).encode()


def _assert_good_ones_handled(here: Installation, good: Counter[str]) -> None:
    answers = here.answers()
    assert {request for _, request in answers} >= {f"r{n}" for n in range(good[RANKING_REQUESTS.name])}
    assert {len(values) for values in answers.values()} == {1}
    result = here.results()[USER, "r2"]
    assert sorted(item.item_id for item in result.items) == ["7", "i1", "i2"]
    assert result.flags == ["duplicate_candidates"]


def _assert_history(here: Installation, events: int) -> None:
    """Every good event is in serve's state, and every good vector; nothing of the bad ones."""
    with state.stores(here.workers[2].state) as stores:
        found = [History("history", 100, impressions=False).read(store, [USER])[0].items for store in stores]
    assert sorted(item for items in found for item in items) == sorted(f"e{n}" for n in range(events))


def _restarted_workers_write_no_letter_again(here: Installation, letters: int) -> None:
    """Serve reads back what lies on ranked-results, the bad ones among it."""
    here.start("speculate", "serve")
    here.settle()
    time.sleep(1.0)  # letters of items come from a timer
    assert len(here.dead_letters()) == letters


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)

"""Events and items: every rule of the contract, each with the reason it is refused for; and nothing is lost on the way."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import BadRecord
from schemas.events import (
    AHEAD_MS_MAX,
    KNOWN_TYPES,
    Event,
    Item,
    decode_event,
    decode_events,
    decode_item,
    encode_event,
    type_code,
)

NOW = 1_780_000_000_000


def event(**fields: object) -> bytes:
    return json.dumps({"user_id": "u", "item_id": "i", "event_type": "click", "ts": NOW} | fields).encode()


def reason_of(value: bytes | None, key: bytes | None = b"u") -> str:
    with pytest.raises(BadRecord) as caught:
        decode_event(key, value, NOW)
    return caught.value.reason


def test_a_good_event_is_read() -> None:
    assert decode_event(b"u", event(), NOW) == ("u", "i", type_code("click"), NOW)


def test_unknown_fields_are_a_producers_own() -> None:
    assert decode_event(b"u", event(page="home", nested={"a": [1]}), NOW)[0] == "u"


def test_integer_ids_and_a_missing_ts() -> None:
    assert decode_event(b"7", event(user_id=7, item_id=9, ts=None), NOW) == ("7", "9", type_code("click"), NOW)


@pytest.mark.parametrize(
    ("ts", "reason"),
    [
        (0, "ts_not_positive"),
        (-1, "ts_not_positive"),
        (NOW // 1000, "ts_seconds"),
        (NOW * 1000, "ts_micros"),
        (NOW * 1_000_000, "ts_micros"),
        ("2026-12-01T00:00:00Z", "ts_type"),
        ("2026-12-01T00:00:00", "ts_type"),
        (str(NOW), "ts_type"),
        (NOW + 0.5, "ts_type"),
        (True, "ts_type"),
        (NOW + AHEAD_MS_MAX + 1, "ts_future"),
    ],
)
def test_only_milliseconds_are_a_ts(ts: object, reason: str) -> None:
    assert reason_of(event(ts=ts)) == reason


def test_five_minutes_ahead_is_still_good() -> None:
    assert decode_event(b"u", event(ts=NOW + AHEAD_MS_MAX), NOW)[3] == NOW + AHEAD_MS_MAX


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "empty"),
        (b"", "empty"),
        (b"{", "json"),
        (b"\xff\xfe", "json"),
        (b'{"user_id": "\xff"}', "json"),
        (b"[1, 2]", "shape"),
        (b"null", "shape"),
        (b'"text"', "shape"),
        (b"{}", "shape"),
        (b"[" * 5000, "shape"),
        (b'{"x":' + b"[" * 20_000, "json"),
        (event(user_id=1.5), "shape"),
        (event(event_type=7), "shape"),
        (event(event_type=""), "event_type"),
        (event(event_type="$forget"), "event_type"),
        (event(event_type="x" * 65), "event_type"),
        (event(item_id=""), "id_empty"),
        (event(item_id="x" * 257), "id_long"),
        (event(user_id="someone else"), "key"),
        (b'{"user_id":"u","item_id":"\\ud800","event_type":"click"}', "json"),
    ],
)
def test_bad_records_name_their_reason(value: bytes | None, reason: str) -> None:
    assert reason_of(value) == reason


@pytest.mark.parametrize("key", [None, b"", b"other"])
def test_a_key_that_is_not_the_user_is_refused(key: bytes | None) -> None:
    assert reason_of(event(), key) == "key"


def test_a_batch_keeps_every_index_once() -> None:
    values = [event(item_id="a"), b"{", event(item_id="b"), None, event(item_id="c", ts=1)]
    batch, refused = decode_events(3, [10, 11, 14, 15, 16], [b"u"] * 5, values, [NOW] * 5)
    assert batch.items == ["a", "b"]
    assert batch.offsets.tolist() == [10, 14]
    assert batch.partition == 3
    assert [(index, error.reason) for index, error in refused] == [(1, "json"), (3, "empty"), (4, "ts_seconds")]


def test_an_empty_batch_has_columns() -> None:
    batch, refused = decode_events(0, [], [], [], [])
    assert (len(batch), batch.ts.shape, refused) == (0, (0,), [])


@settings(max_examples=300)
@given(st.binary(max_size=64) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["user_id", "item_id", "event_type", "ts"]), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_bytes_raise_anything_else(value: bytes) -> None:
    _batch, refused = decode_events(0, [0], [b"u"], [value], [NOW])
    assert len(_batch) + len(refused) == 1


def test_codes_of_known_types_never_move() -> None:
    assert [type_code(name) for name in KNOWN_TYPES] == list(range(1, len(KNOWN_TYPES) + 1))
    assert 32 <= type_code("wishlist") <= 255


def test_events_round_trip() -> None:
    made = Event("u", "i", "click", NOW, request_id="r")
    assert msgspec.json.decode(encode_event(made), type=Event) == made


def test_items_and_withdrawn_items() -> None:
    assert decode_item(b"i", b'{"item_id":"i","category":"c","content":[0.5,1]}') == ("i", Item("i", "c", [0.5, 1.0]))
    assert decode_item(b"i", None) == ("i", None)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (None, None, "key"),
        (b"\xff", None, "key"),
        (b"i", b"", "empty"),
        (b"j", b'{"item_id":"i"}', "key"),
        (None, b'{"item_id":"i"}', "key"),
        (b"i", b'{"item_id":""}', "id_empty"),
        (b"i", b'{"item_id":"i","category":""}', "id_empty"),
        (b"i", json.dumps({"item_id": "i", "content": [0.0] * 257}).encode(), "content"),
        (b"i", b'{"item_id":"i","content":[NaN]}', "json"),
        (b"i", b'{"item_id":"i","content":[1e999]}', "shape"),
        (b"i", b'{"item_id":"i","content":["a"]}', "shape"),
    ],
)
def test_bad_items_name_their_reason(key: bytes | None, value: bytes | None, reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        decode_item(key, value)
    assert caught.value.reason == reason

"""Dead letters: the bytes come back, and the largest record a broker takes still fits into a letter."""

from __future__ import annotations

import base64

import msgspec
import pytest

from schemas.deadletters import KEY_BYTES_MAX, VALUE_BYTES_MAX, DeadLetter, dead_letter
from schemas.errors import BadRecord
from schemas.events import decode_event

BROKER_BYTES_MAX = 1_048_588  # `message.max.bytes` of Kafka's brokers
PRODUCER_BYTES_MAX = 1_000_000  # of librdkafka, and `[transport] record_bytes_max`
REFUSED = BadRecord("json", "not JSON")


def read(value: bytes) -> DeadLetter:
    return msgspec.json.decode(value, type=DeadLetter)


def test_a_letter_says_where_the_record_lies_and_keeps_its_bytes() -> None:
    key, value = dead_letter("solaris.events", 3, 41, 1_780_000_000_000, b"u1", b"\xff{", REFUSED)
    letter = read(value)
    assert key == b"solaris.events/3/41"
    assert (letter.topic, letter.partition, letter.offset, letter.reason) == ("solaris.events", 3, 41, "json")
    assert base64.b64decode(letter.key or "") == b"u1"
    assert base64.b64decode(letter.value or "") == b"\xff{"
    assert not letter.cut


def test_a_missing_key_and_value_stay_missing() -> None:
    letter = read(dead_letter("solaris.events", 0, 0, 1, None, None, REFUSED)[1])
    assert (letter.key, letter.value, letter.cut) == (None, None, False)


@pytest.mark.parametrize(("key_bytes", "value_bytes"), [(10, BROKER_BYTES_MAX - 100), (BROKER_BYTES_MAX // 2,) * 2])
def test_the_letter_of_the_largest_record_can_be_sent(key_bytes: int, value_bytes: int) -> None:
    key, value = dead_letter("t" * 249, 0, 0, 1, b"k" * key_bytes, b"v" * value_bytes, REFUSED)
    letter = read(value)
    assert len(key) + len(value) <= PRODUCER_BYTES_MAX
    assert letter.cut
    assert base64.b64decode(letter.value or "") == b"v" * min(value_bytes, VALUE_BYTES_MAX)
    assert base64.b64decode(letter.key or "") == b"k" * min(key_bytes, KEY_BYTES_MAX)


def test_the_sentence_about_a_long_key_is_short_enough_too() -> None:
    with pytest.raises(BadRecord) as refused:
        decode_event(b"\x00" * 900_000, b'{"user_id": "u", "item_id": "i", "event_type": "view"}', 1)
    _, value = dead_letter("solaris.events", 0, 0, 1, b"\x00" * 900_000, b"{}", refused.value)
    assert len(value) < 20_000

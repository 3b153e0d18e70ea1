"""What becomes of a record that breaks a rule: the reasons, and the letter that keeps its bytes.

In: the record as it was read, and why it was refused. Out: one JSON letter, keyed by where the record lies. Never: a letter larger
than a broker takes by default (1 MB), or one record too large to complain of would stop its partition.
"""

from __future__ import annotations

import base64

import msgspec

from schemas.errors import BadRecord

REASONS: dict[str, str] = {
    "empty": "the value is null or has no bytes",
    "json": "not JSON, or not UTF-8",
    "shape": "JSON of another shape or type than the topic's schema",
    "id_empty": "an id of no bytes",
    "id_long": "an id of more than 256 bytes",
    "id_surrogate": "an id with a lone surrogate",
    "key": "the record's key is not its user id (items: its item id)",
    "ts_type": "ts is not an integer",
    "ts_not_positive": "ts is zero or less",
    "ts_seconds": "ts looks like seconds; send milliseconds",
    "ts_micros": "ts looks like micro- or nanoseconds; send milliseconds",
    "ts_future": "ts is more than 5 minutes ahead of the record's append time",
    "event_type": "event_type is empty, too long or reserved",
    "candidates": "more than 1,000 candidates",
    "request_id": "request_id is empty or too long",
    "content": "an item's content holds a number that is not finite, or too many numbers",
    "magic": "an inner record of another kind",
    "version": "an inner record of a version that this release can't read",
    "length": "an inner record whose length is not what its header says",
    "vector": "an embedding that is not finite, all zero, or of another size than its space has",
    "handler": "processing this record failed again and again",
}
"""Reason codes, and what each means. Counters are keyed by them."""

KEY_BYTES_MAX, VALUE_BYTES_MAX, SENTENCE_CHARS_MAX = 4_096, 640 << 10, 2_000
"""What a letter keeps of its record: base64 makes four bytes of three, and the whole must fit into 1 MB."""


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True):
    """One refused record with its bytes (base64), so that it can be mended and sent again.

    `cut`: of the key or the value only the beginning is here; the whole lies at (topic, partition, offset).
    """

    topic: str
    partition: int
    offset: int
    reason: str
    sentence: str
    append_ts: int
    key: str | None = None
    value: str | None = None
    cut: bool = False
    version: int = 1


def dead_letter(
    topic: str, partition: int, offset: int, append_ms: int, key: bytes | None, value: bytes | None, error: BadRecord
) -> tuple[bytes, bytes]:
    """Key and JSON value of the letter for one record."""
    cut = len(key or b"") > KEY_BYTES_MAX or len(value or b"") > VALUE_BYTES_MAX
    letter = DeadLetter(
        topic, partition, offset, error.reason, error.sentence[:SENTENCE_CHARS_MAX], append_ms,
        _b64(key, KEY_BYTES_MAX), _b64(value, VALUE_BYTES_MAX), cut,
    )  # fmt: skip
    return f"{topic}/{partition}/{offset}".encode(), msgspec.json.encode(letter)


def _b64(data: bytes | None, bytes_max: int) -> str | None:
    return None if data is None else base64.b64encode(data[:bytes_max]).decode()

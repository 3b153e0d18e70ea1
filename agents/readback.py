"""What a predecessor answered: results read back from the topic, so that a repeated request gets the same bytes again.

In: the offset that the group's commit holds (where answers after that commit could begin). Out: those answers at
once, and as a future the newest of those before it, as far back as answers stand. Never joins a group.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from confluent_kafka import Consumer, Message, TopicPartition

from agents.kafka import ANSWER_S_MAX, KafkaConfig, answered, librdkafka_settings, passes
from schemas.errors import FatalError

TIMEOUT_S = 10.0
ROWS = 1_000
OLDER_BYTES_MAX = 256 << 20
"""Of the older answers at most so many bytes are held until they are taken over; the oldest give way."""

_readers = ThreadPoolExecutor(2, thread_name_prefix="readback")


@dataclass(frozen=True)
class Found:
    """`recent`: values from the mark to the end; `older`: those before it, when they are read (None: there are none)."""

    recent: list[bytes]
    older: Future[list[bytes]] | None


def read_back(
    kafka: KafkaConfig, topic: str, partition: int, mark: int | None, window_ms: int, timeout_s: float = ANSWER_S_MAX
) -> tuple[Found, int]:
    """What lies in `topic` from `mark` (None: everything is older) to its end, and the end's offset."""
    consumer = _consumer(kafka)
    try:
        with answered(kafka, f"the offsets of {topic}-{partition}"):
            low, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=timeout_s)
            since_ms = int(time.time() * 1000) - window_ms
            asked = [TopicPartition(topic, partition, since_ms)]
            window = consumer.offsets_for_times(asked, timeout=timeout_s)[0].offset
        oldest = end if window < 0 else max(low, window)
        first = end if mark is None else min(max(low, mark), end)
        recent = _values(consumer, topic, partition, first, end)
    finally:
        consumer.close()
    older = None if oldest >= first else _readers.submit(_older, kafka, topic, partition, oldest, first)
    return Found(recent, older), end


def _older(kafka: KafkaConfig, topic: str, partition: int, first: int, end: int) -> list[bytes]:
    consumer = _consumer(kafka)
    try:
        return _values(consumer, topic, partition, first, end, OLDER_BYTES_MAX)
    finally:
        consumer.close()


def _values(
    consumer: Consumer, topic: str, partition: int, first: int, end: int, bytes_max: float = math.inf
) -> list[bytes]:
    """Values of the records [first, end), of more than `bytes_max` the newest."""
    values: deque[bytes] = deque()
    size = 0
    for message in records(consumer, topic, partition, first, end):
        if (value := _bytes(message.value())) is not None:
            values.append(value)
            size += len(value)
        while size > bytes_max:
            size -= len(values.popleft())
    return list(values)


def records(consumer: Consumer, topic: str, partition: int, first: int, end: int) -> Iterator[Message]:
    """The records [first, end) of a topic-partition. Raises `FatalError` where none comes for `TIMEOUT_S`."""
    if first >= end:
        return
    consumer.assign([TopicPartition(topic, partition, first)])
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        for message in consumer.consume(ROWS, 0.1):
            error = message.error()
            if error is not None and not passes(error):
                raise FatalError(f"reading back {topic}-{partition} failed: {error.str()}")
            if error is None and (message.offset() or 0) < end:
                yield message
            deadline = time.monotonic() + TIMEOUT_S
        if consumer.position([TopicPartition(topic, partition)])[0].offset >= end:
            return
        if time.monotonic() > deadline:
            raise FatalError(
                f"reading back {topic}-{partition} came to no end within {TIMEOUT_S:g} s; check the broker"
            )


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _consumer(kafka: KafkaConfig) -> Consumer:
    settings = {"group.id": f"readback-{uuid.uuid4()}", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    return Consumer(librdkafka_settings(kafka) | settings)

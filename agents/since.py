"""Where a fold without a stamp begins: at the first record that could still count, instead of at the log's start.

In: a topic-partition and the window of its fold. Out: an offset. Never: one that leaves out a record whose row would be live.

A record's event time is at most five minutes ahead of its append time (schemas.events quarantines the rest). So one that is live at
`now`, with event time > now - window, was appended after now - window - 5 min. `now` is the partition's clock, which is not known
yet; but it is no earlier than the event time of any record, so the newest of the log's last records will do: an earlier `now` only
begins earlier. Where event time lags append time (an old log played live) that is the log's start, as it must be.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from confluent_kafka import Consumer, Message, TopicPartition

from agents.kafka import ANSWER_S_MAX, KafkaConfig, answered, librdkafka_settings
from agents.readback import records
from schemas.errors import BadRecord
from schemas.events import AHEAD_MS_MAX

TAIL_ROWS = 200


def since(
    kafka: KafkaConfig,
    topic: str,
    partition: int,
    ends: tuple[int, int],
    window_ms: int,
    event_ms: Callable[[bytes | None], int],
) -> int:
    """The first offset of the log `ends` = [begin, end) from which everything is read that can count for `window_ms`.

    `event_ms` is a value's event time; it raises `BadRecord`. The log's start where its last records tell no time.
    """
    begin, end = ends
    if begin >= end:
        return begin
    consumer = Consumer(
        librdkafka_settings(kafka)
        | {"group.id": f"since-{uuid.uuid4()}", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    )
    try:
        newest = _newest_ms(records(consumer, topic, partition, max(begin, end - TAIL_ROWS), end), event_ms)
        if newest is None:
            return begin
        asked = [TopicPartition(topic, partition, max(0, newest - window_ms - AHEAD_MS_MAX))]
        with answered(kafka, f"the offsets of {topic}-{partition}"):
            found = consumer.offsets_for_times(asked, timeout=ANSWER_S_MAX)[0].offset
        return end if found < 0 else min(max(begin, found), end)
    finally:
        consumer.close()


def _newest_ms(tail: Iterable[Message], event_ms: Callable[[bytes | None], int]) -> int | None:
    """The newest event time of these records."""
    newest: int | None = None
    for message in tail:
        value = message.value()
        try:
            ms = event_ms(value.encode() if isinstance(value, str) else value)
        except BadRecord:
            continue
        ms = min(ms, message.timestamp()[1] + AHEAD_MS_MAX)  # else one wrong record would hide those that count
        newest = ms if newest is None else max(newest, ms)
    return newest

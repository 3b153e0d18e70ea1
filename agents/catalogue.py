"""The catalogue in every process: all partitions of `items`, from their start, into the item index.

In: records of `items`. Out: calls of `apply` with (item id, item or None), in the order of each partition. Never joins a group;
a bad record is counted and skipped, and `refuse` is told: its dead letter is one speculate worker's to write (agents/follow.py).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

from confluent_kafka import Consumer, Message, TopicPartition

from agents.kafka import ANSWER_S_MAX, KafkaConfig, answered, librdkafka_settings, partitions_of, passes
from schemas.errors import BadRecord, FatalError
from schemas.events import Item, decode_item
from schemas.topics import ITEMS

log = logging.getLogger("solaris.catalogue")

LOAD_S_MAX = 300.0
ROWS_MAX = 5_000

Apply = Callable[[Sequence[tuple[str, Item | None]]], None]
Refuse = Callable[[Message, BadRecord], None]


class Catalogue:
    """Follows `items`; `offset` is the sum of the positions of its partitions, which results name."""

    def __init__(
        self, kafka: KafkaConfig, apply: Apply, refuse: Refuse | None = None, timeout_s: float = ANSWER_S_MAX
    ) -> None:
        self._topic = kafka.topic(ITEMS)
        self._apply, self._refuse = apply, refuse
        self.counts: Counter[str] = Counter()
        self._consumer = Consumer(
            librdkafka_settings(kafka)
            | {"group.id": f"catalogue-{uuid.uuid4()}", "enable.auto.commit": False, "enable.partition.eof": False}
        )
        self._positions = dict.fromkeys(partitions_of(self._consumer, kafka, self._topic, timeout_s), 0)
        self._ends: dict[int, int] = {}
        for number in self._positions:
            at = TopicPartition(self._topic, number)
            with answered(kafka, f"the end of {self._topic}-{number}"):
                self._positions[number], self._ends[number] = self._consumer.get_watermark_offsets(
                    at, timeout=timeout_s
                )
        self._consumer.assign([TopicPartition(self._topic, n, at) for n, at in self._positions.items()])

    @property
    def offset(self) -> int:
        """How much of the catalogue is applied."""
        return sum(self._positions.values())

    def load(self) -> None:
        """Apply everything that was there at the start. Raises `FatalError` when the broker stops answering."""
        deadline = time.monotonic() + LOAD_S_MAX
        while any(self._positions[number] < end for number, end in self._ends.items()):
            self.poll(0.1)
            self._skip_gaps()
            if time.monotonic() > deadline:
                raise FatalError(f"{self._topic} was not read within {LOAD_S_MAX:g} s; look at the broker's log")
        log.info("catalogue: %d records applied, %d refused", self.counts["applied"], self.counts["refused"])

    def poll(self, timeout_s: float) -> None:
        """Apply what has come within `timeout_s` seconds."""
        applied: list[tuple[str, Item | None]] = []
        for message in self._consumer.consume(ROWS_MAX, timeout_s):
            error = message.error()
            if error is not None:
                if not passes(error):
                    raise FatalError(f"reading {self._topic} failed: {error.str()}")
                continue
            self._positions[message.partition() or 0] = (message.offset() or 0) + 1
            try:
                applied.append(decode_item(record_bytes(message.key()), record_bytes(message.value())))
            except BadRecord as bad:
                self.counts["refused"] += 1
                if self._refuse is not None:
                    self._refuse(message, bad)
        if applied:
            self._apply(applied)
            self.counts["applied"] += len(applied)

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def _skip_gaps(self) -> None:
        """Compaction may have removed the last records: the consumer's own position knows."""
        asked = [TopicPartition(self._topic, number) for number in self._positions]
        for at in self._consumer.position(asked):
            if at.offset > self._positions[at.partition]:
                self._positions[at.partition] = at.offset


def record_bytes(value: str | bytes | None) -> bytes | None:
    """A key or value as bytes (the client's types allow text, too)."""
    return value.encode() if isinstance(value, str) else value

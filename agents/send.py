"""Sending with confluent-kafka: waits where the client's queue is full, and remembers what the broker did not take.

In: records. Out: records on their topics, calls of `on_delivered`. Never: drops a record in silence:
`failed` and `flush` count them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from agents.kafka import KafkaConfig, librdkafka_settings

FULL_POLL_S = 0.05


class Sender:
    """One producer; `failed` counts what was not acknowledged, by the client's words."""

    def __init__(
        self,
        kafka: KafkaConfig,
        settings: dict[str, Any],
        on_delivered: Callable[[KafkaError | None, Message], None] | None = None,
    ) -> None:
        """`settings` over the cluster's; `on_delivered` gets the broker's word on each record, inside `send`, `poll` or `flush`."""
        self._producer = Producer(librdkafka_settings(kafka, producer=True) | {"acks": "all"} | settings)
        self._on_delivered = on_delivered
        self.failed: Counter[str] = Counter()

    def send(self, topic: str, key: bytes, value: bytes, partition: int = -1) -> None:
        """Queue one record, -1 = to the key's partition; waits while the queue is full."""
        while True:
            try:
                self._producer.produce(topic, value, key, partition, on_delivery=self._delivered)
                break
            except BufferError:
                self._producer.poll(FULL_POLL_S)
        self._producer.poll(0)

    def poll(self, timeout_s: float) -> None:
        """Take what the broker said within `timeout_s` seconds."""
        self._producer.poll(timeout_s)

    def flush(self, timeout_s: float) -> int:
        """Wait for the broker's word on every record; how many have none after `timeout_s` seconds."""
        return int(self._producer.flush(timeout_s))

    def give_up(self) -> None:
        """Drop what has no word yet; it is counted in `failed`."""
        self._producer.purge()
        self._producer.flush(1.0)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failed[error.str()] += 1
        if self._on_delivered is not None:
            self._on_delivered(error, message)

"""The one producer of a process: batched in C, idempotent, bounded, and acknowledged before anything is committed.

In: records from the partitions' processors. Out: Kafka. Never: a record lost without the process stopping; librdkafka
retries until the delivery timeout, and what fails then is gone from its queue, so nothing may be committed after that.

`barrier` is what commits wait for: it opens a new *epoch* and waits until every record of the older ones is acknowledged.
(librdkafka's own flush waits for an empty queue, which steady traffic never gives it.)
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from schemas.errors import FatalError

from .batch import Headers

_POLL_S = 0.05
_FULL_WAIT_S = 0.001
_Send = tuple[str, int, bytes | None, bytes | None, Headers]


class Output:
    """The producer, shared by all partitions of a process.

    `kafka` are librdkafka's connection settings. A delivery that takes longer than `delivery_ms_max` stops the process:
    it must be less than the group's rebalance timeout, so that a partition is never handed on with outputs in doubt.
    """

    def __init__(
        self,
        kafka: Mapping[str, Any],
        *,
        delivery_ms_max: int = 20_000,
        queue_rows_max: int = 100_000,
        queue_kbytes_max: int = 262_144,
        record_bytes_max: int = 1_000_000,
        linger_ms: float = 1.0,
    ) -> None:
        self._record_bytes_max = record_bytes_max
        self._delivery_ms_max = delivery_ms_max
        self._lock = threading.Lock()
        self._epoch = 0
        self._pending: dict[int, int] = {0: 0}
        self._acknowledged = partial(self._on_delivery, 0)
        self._reached: dict[tuple[str, int], int] = {}
        self._error: str | None = None
        self._closed = False
        self._producer = Producer(
            {
                **kafka,
                "acks": "all",
                "enable.idempotence": True,
                "delivery.timeout.ms": delivery_ms_max,
                "queue.buffering.max.messages": queue_rows_max,
                "queue.buffering.max.kbytes": queue_kbytes_max,
                "message.max.bytes": record_bytes_max + 4_096,
                "linger.ms": linger_ms,
                "socket.nagle.disable": True,
            }
        )
        self._poller = threading.Thread(target=self._poll, name="output-poll", daemon=True)
        self._poller.start()

    def partition(self) -> HeldOutput:
        """An output for one partition's processor."""
        return HeldOutput(self, self._record_bytes_max)

    def reached(self, topic: str, partition: int) -> int | None:
        """The offset after the last acknowledged record of ours on that partition."""
        return self._reached.get((topic, partition))

    def check(self) -> None:
        """FatalError if a delivery failed."""
        if self._error is not None:
            raise FatalError(self._error)

    async def release(self, held: deque[_Send]) -> None:
        """Hand everything in `held` to the producer; waits while its queue is full."""
        while held:
            self.check()
            topic, partition, key, value, headers = held[0]
            with self._lock:
                self._pending[self._epoch] += 1
                epoch, acknowledged = self._epoch, self._acknowledged
            try:
                self._producer.produce(
                    topic, value, key, partition, on_delivery=acknowledged, headers=list(headers) or None
                )
            except BufferError:
                self._settle(epoch)
                await asyncio.sleep(_FULL_WAIT_S)
                continue
            except KafkaException as error:
                self._settle(epoch)
                raise FatalError(f"the producer refused a record for {topic}-{partition}: {error}") from error
            held.popleft()

    async def barrier(self, timeout_s: float) -> bool:
        """Whether all that was released before this call is acknowledged within `timeout_s`. FatalError if any failed."""
        with self._lock:
            last = self._epoch
            if any(self._pending.values()):
                self._epoch += 1
                self._pending[self._epoch] = 0
                self._acknowledged = partial(self._on_delivery, self._epoch)
        deadline = time.monotonic() + timeout_s
        while not self._settled(last):
            self.check()
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_FULL_WAIT_S)
        self.check()
        return True

    def close(self, timeout_s: float) -> int:
        """Send what is left, stop the producer. The number of records that were not acknowledged."""
        left = int(self._producer.flush(timeout_s))
        self._closed = True
        self._poller.join(timeout=5.0)
        return left

    def _settled(self, last: int) -> bool:
        with self._lock:
            for epoch in [epoch for epoch, rows in self._pending.items() if epoch <= last and rows == 0]:
                if epoch != self._epoch:
                    del self._pending[epoch]
            return all(epoch > last or rows == 0 for epoch, rows in self._pending.items())

    def _settle(self, epoch: int) -> None:
        with self._lock:
            self._pending[epoch] -= 1

    def _on_delivery(self, epoch: int, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._error = (
                f"{message.topic()}-{message.partition()}: a record was not acknowledged within "
                f"{self._delivery_ms_max} ms ({error}); nothing after the last commit counts as answered. "
                "Check the brokers, then start the worker again"
            )
        else:
            key = (str(message.topic()), int(message.partition() or 0))
            after = int(message.offset() or 0) + 1
            if after > self._reached.get(key, 0):
                self._reached[key] = after
        self._settle(epoch)

    def _poll(self) -> None:
        while not self._closed:
            self._producer.poll(_POLL_S)


class HeldOutput:
    """One processor's output: sends are held until its call returned, so that a call that raises has sent nothing."""

    def __init__(self, output: Output, record_bytes_max: int) -> None:
        self._output = output
        self._record_bytes_max = record_bytes_max
        self._held: deque[_Send] = deque()
        self.reached: Callable[[str, int], int | None] = output.reached

    def send(self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers = ()) -> None:
        """Send a record to a partition by number. ValueError if key and value exceed the producer's limit."""
        size = len(key or b"") + len(value or b"")
        if size > self._record_bytes_max:
            raise ValueError(f"a record of {size} bytes for {topic}-{partition} exceeds {self._record_bytes_max} bytes")
        self._held.append((topic, partition, key, value, headers))

    def discard(self) -> None:
        """Forget what was sent in the call that raised."""
        self._held.clear()

    async def release(self) -> None:
        """Hand what was sent to the producer; waits while its queue is full."""
        if self._held:
            await self._output.release(self._held)

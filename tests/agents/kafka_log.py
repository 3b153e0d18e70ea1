"""Topics, records and offsets for the transport's tests, and worker processes that always end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

PARTITIONS = 4
QUICK: dict[str, Any] = {"commit_ms": 200, "session_ms": 6_000, "heartbeat_ms": 500}

_SILENT = logging.getLogger("tests.kafka")  # librdkafka writes to stderr when the broker goes before its clients
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


class Log:
    """Four topics of their own on a broker: two inputs, one for outputs, one for dead letters; and a group."""

    def __init__(self, bootstrap: str, config: dict[str, str] | None = None, partitions: int = PARTITIONS) -> None:
        self.bootstrap = bootstrap
        self.partitions = partitions
        name = f"t{secrets.token_hex(4)}"
        self.group = f"{name}-group"
        self.inputs = [f"{name}.a", f"{name}.b"]
        self.output, self.dead = f"{name}.out", f"{name}.dead"
        self.client: dict[str, Any] = {"bootstrap.servers": bootstrap, "logger": _SILENT}
        self.admin = AdminClient(self.client)
        self._create([NewTopic(topic, partitions, 1, config=config or {}) for topic in self.inputs])
        self._create([NewTopic(topic, partitions, 1) for topic in (self.output, self.dead)])
        self._client = Consumer({**self.client, "group.id": self.group, "enable.auto.commit": False})

    def _create(self, topics: list[NewTopic]) -> None:
        for made in self.admin.create_topics(topics).values():
            made.result(30)

    def produce(
        self, rows: int, topic: int = 0, first: int = 0, size: int = 8, settings: dict[str, Any] | None = None
    ) -> list[bytes]:
        """Write `rows` records round the partitions of an input topic; their values."""
        producer = Producer({**self.client, "linger.ms": 5, **(settings or {})})
        values = [b"%d-%d" % (topic, first + index) for index in range(rows)]
        for index, value in enumerate(values):
            producer.produce(self.inputs[topic], value.ljust(size), b"key", index % self.partitions)
            if index % 1_000 == 0:
                producer.poll(0)
        assert producer.flush(30) == 0
        return values

    def put(self, value: bytes, topic: int = 0, partition: int = 0) -> None:
        """Write one record."""
        producer = Producer(self.client)
        producer.produce(self.inputs[topic], value, b"key", partition)
        assert producer.flush(30) == 0

    def read(self, topic: str, wanted: int, timeout_s: float = 60.0, settle_s: float = 1.0) -> list[Message]:
        """All records of `topic`: waits until there are `wanted`, and then `settle_s` more for those that should not be."""
        consumer = Consumer({**self.client, "group.id": "reader", "enable.auto.commit": False})
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(self.partitions)])
        got: list[Message] = []
        deadline = time.monotonic() + timeout_s
        while len(got) < wanted and time.monotonic() < deadline:
            got += [message for message in consumer.consume(5_000, 0.1) if message.error() is None]
        deadline = time.monotonic() + settle_s
        while time.monotonic() < deadline:
            got += [message for message in consumer.consume(5_000, 0.1) if message.error() is None]
        consumer.close()
        return got

    def committed(self) -> dict[tuple[str, int], int]:
        """What the group holds."""
        tps = [TopicPartition(topic, partition) for topic in self.inputs for partition in range(self.partitions)]
        return {(tp.topic, tp.partition): tp.offset for tp in self._client.committed(tps, timeout=10) if tp.offset >= 0}

    def ends(self) -> dict[tuple[str, int], int]:
        """The ends of the inputs' logs; again while a broker that just came back has no leaders yet."""
        deadline = time.monotonic() + 20
        while True:
            try:
                return self._ends()
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _ends(self) -> dict[tuple[str, int], int]:
        return {
            (topic, partition): self._client.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)[1]
            for topic in self.inputs
            for partition in range(self.partitions)
        }

    def lag(self) -> int:
        """Offsets that are not committed yet, over all inputs."""
        held = self.committed()
        return sum(end - held.get(place, 0) for place, end in self.ends().items())

    def rewind(self, offsets: dict[tuple[str, int], int]) -> None:
        """Set the group's offsets, while it is empty; again until they are there (a fresh broker's coordinator still loads)."""
        tps = [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]

        def took() -> bool:
            request = [ConsumerGroupTopicPartitions(self.group, tps)]
            for done in self.admin.alter_consumer_group_offsets(request).values():
                with contextlib.suppress(KafkaException, TimeoutError):
                    done.result(10)
            return offsets.items() <= self.committed().items()

        until(took, what=f"the group's offsets at {offsets}")

    def options(self, **options: Any) -> dict[str, Any]:
        """Arguments of a worker process on these topics."""
        transport = QUICK | options.pop("transport", {})
        return {
            "bootstrap": self.bootstrap, "group": self.group, "inputs": self.inputs, "output": self.output,
            "dead": self.dead, "transport": transport, **options,
        }  # fmt: skip


class WorkerProcess:
    """A worker in a process of its own, and what it told."""

    def __init__(self, options: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-W", "default", "-m", "tests.agents.transport_worker", json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        )
        self.log: list[str] = []
        self._readers = [threading.Thread(target=self._read_events), threading.Thread(target=self._read_log)]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.append(json.loads(line))

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        self.log.extend(self._process.stderr)

    def told(self, event: str) -> list[dict[str, Any]]:
        """The events of a kind, in order."""
        return [told for told in list(self.events) if told["event"] == event]

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Signal, wait, and return the exit code."""
        self._process.send_signal(number)
        return self.ended(timeout_s)

    def ended(self, timeout_s: float = 30.0) -> int:
        """Wait for the process to end by itself; its exit code."""
        code = self._process.wait(timeout_s)
        for reader in self._readers:
            reader.join(5)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return code

    def kill(self) -> None:
        """End it at once, whatever its state."""
        if self._process.poll() is None:
            self._process.kill()
        self.ended()

    def rss_mb(self) -> float:
        """Resident memory."""
        with open(f"/proc/{self.pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def workers() -> Iterator[Callable[..., WorkerProcess]]:
    """Start worker processes; all are gone when the block ends."""
    started: list[WorkerProcess] = []

    def start(options: dict[str, Any], **environment: str) -> WorkerProcess:
        started.append(WorkerProcess(options, environment))
        return started[-1]

    try:
        yield start
    finally:
        for worker in started:
            worker.kill()


def until(true: Callable[[], Any], timeout_s: float = 60.0, what: str = "") -> None:
    """Wait until it is true; AssertionError with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def values(messages: Sequence[Message]) -> list[bytes]:
    """Their values, without the padding."""
    return [(message.value() or b"").rstrip() for message in messages]

"""An installation of its own for each test: topics under a prefix, workers, records in and out.

In: a broker's address, a bundle. Out: topics with four partitions, worker processes, everything that lies on a topic. All workers
are gone when its block ends.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from agents.groups import group_id, group_topics, worker_lag
from agents.kafka import KafkaConfig, ensure_topics, librdkafka_settings
from agents.lag import Lag
from schemas.deadletters import DeadLetter
from schemas.errors import BadRecord
from schemas.ranking import RankedResult, RankingRequest, decode_result, encode_request
from schemas.topics import DEAD_LETTERS, RANKED_RESULTS, RANKING_REQUESTS, TopicSpec
from tests.integration.fleet import Worker, until

PARTITIONS = 4
ROLES = ("speculate", "infer", "serve")
QUICK = {
    "SOLARIS_TRANSPORT__COMMIT_MS": "50",
    "SOLARIS_TRANSPORT__SESSION_MS": "3000",  # the embedded broker takes less than Kafka's usual 6 s
    "SOLARIS_TRANSPORT__HEARTBEAT_MS": "200",
    "SOLARIS_VERIFY__DEADLINE_MS": "300000",  # a slow machine must not drop FM work: what is lost shall be a fault
    "OMP_NUM_THREADS": "1",
}

_log = logging.getLogger("tests.integration")  # librdkafka's own words, when the broker goes before its clients
_log.addHandler(logging.NullHandler())
_log.propagate = False


class Installation:
    """A context manager; `settings` are further environment variables of its workers."""

    def __init__(
        self, kafka: KafkaConfig, bundle: Path, folder: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        self.kafka = replace(kafka, topic_prefix=f"test-{secrets.token_hex(4)}.")
        self.bundle, self.folder = bundle, folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.settings = QUICK | _environment(self.kafka) | dict(settings or {})
        self.workers: list[Worker] = []
        ensure_topics(self.kafka, partitions=PARTITIONS)
        self.client: dict[str, Any] = librdkafka_settings(self.kafka) | {"logger": _log}
        self._producer = Producer(librdkafka_settings(self.kafka, producer=True) | {"logger": _log, "linger.ms": 1})
        self._lag = worker_lag(self.kafka)

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.kill()

    def start(self, *roles: str, settings: Mapping[str, str] | None = None) -> list[Worker]:
        """Start a worker of each role and wait until they are ready; `role:name` gives it a name and so a state folder."""
        started = []
        for role in roles:
            role, _, name = role.partition(":")
            chosen = self.settings | dict(settings or {})
            started.append(Worker(role, name or role, self.bundle, self.folder, chosen))
        self.workers += started
        for worker in started:
            worker.wait_until_ready()
        return started

    def send(
        self,
        topic: TopicSpec,
        key: bytes | None,
        value: bytes | None,
        partition: int = -1,
        producer: Producer | None = None,
    ) -> None:
        """One record; -1 = where Java's partitioner puts it. `flush` before you count on it."""
        (producer or self._producer).produce(self.kafka.topic(topic), value, key, partition)
        (producer or self._producer).poll(0)

    def place(
        self, topic: TopicSpec, records: Iterable[tuple[bytes | None, bytes | None]], partition: int
    ) -> list[int]:
        """Records (key, value) onto one partition, in order; their offsets."""
        offsets: list[int] = []

        def told(error: KafkaError | None, message: Message) -> None:
            assert error is None, error
            offsets.append(message.offset() or 0)

        for key, value in records:
            self._producer.produce(self.kafka.topic(topic), value, key, partition, on_delivery=told)
        self.flush()
        return offsets

    def flush(self, producer: Producer | None = None) -> None:
        """Wait until the broker has everything."""
        assert (producer or self._producer).flush(30) == 0

    def ask(self, *requests: RankingRequest) -> None:
        """Send ranking requests."""
        for request in requests:
            self.send(RANKING_REQUESTS, str(request.user_id).encode(), encode_request(request))
        self.flush()

    def settle(self, timeout_s: float = 90.0) -> None:
        """Wait until the groups that have workers have committed everything."""
        lag = Lag(self.kafka, {group_id(self.kafka, role): group_topics(self.kafka, role) for role in self._roles()})

        def rest() -> bool:
            for worker in self.workers:
                code = worker.died
                assert code is None, f"{worker.name} ended by itself with {code}:\n{worker.log()}"
            return lag.rows() == 0

        until(rest, timeout_s, lambda: f"lag {lag.detail()}\n" + "\n".join(w.log()[-1500:] for w in self.workers))

    def _roles(self) -> set[str]:
        return {worker.role for worker in self.workers if worker.alive}

    def lag(self) -> int:
        """Records that some group has not committed."""
        return self._lag.rows()

    def end(self, topic: TopicSpec) -> int:
        """How many records the topic has, all partitions together."""
        name = self.kafka.topic(topic)
        return sum(end for (other, _), end in self._lag.ends().items() if other == name)

    def committed(self, role: str, topic: TopicSpec) -> int:
        """How many records of the topic the role's group has committed, all partitions together."""
        consumer = Consumer(self.client | {"group.id": group_id(self.kafka, role), "enable.auto.commit": False})
        try:
            places = [TopicPartition(self.kafka.topic(topic), partition) for partition in range(PARTITIONS)]
            return sum(max(0, at.offset) for at in consumer.committed(places, timeout=10))
        finally:
            consumer.close()

    def read(self, topic: TopicSpec) -> list[Message]:
        """Everything that lies on a topic now, partition by partition in order."""
        name = self.kafka.topic(topic)
        consumer = Consumer(self.client | {"group.id": f"test-{secrets.token_hex(4)}", "enable.auto.commit": False})
        try:
            places = [TopicPartition(name, partition, 0) for partition in range(PARTITIONS)]
            ends = {at.partition: consumer.get_watermark_offsets(at, timeout=10)[1] for at in places}
            consumer.assign(places)
            got: dict[int, list[Message]] = {partition: [] for partition in ends}
            deadline = time.monotonic() + 30
            while any(at.offset < ends[at.partition] for at in consumer.position(places) if ends[at.partition]):
                assert time.monotonic() < deadline, f"{name} can't be read to {ends}"
                for message in consumer.consume(5_000, 0.05):
                    assert message.error() is None, message.error()
                    partition = message.partition() or 0
                    if (message.offset() or 0) < ends[partition]:
                        got[partition].append(message)
        finally:
            consumer.close()
        return [message for messages in got.values() for message in messages]

    def answers(self) -> dict[tuple[str, str], list[bytes]]:
        """(user, request id) → values of its results, in the order of the topic; without what is no result."""
        found: dict[tuple[str, str], list[bytes]] = defaultdict(list)
        for message in self.read(RANKED_RESULTS):
            try:
                result = decode_result(message.value())
            except BadRecord:
                continue
            found[result.user_id, result.request_id].append(message.value() or b"")
        return found

    def results(self) -> dict[tuple[str, str], RankedResult]:
        """(user, request id) → its first result."""
        return {key: decode_result(values[0]) for key, values in self.answers().items()}

    def dead_letters(self) -> list[DeadLetter]:
        """All dead letters; each key must name the record's place."""
        letters = []
        for message in self.read(DEAD_LETTERS):
            letter = msgspec.json.decode(message.value() or b"", type=DeadLetter)
            assert message.key() == f"{letter.topic}/{letter.partition}/{letter.offset}".encode()
            letters.append(letter)
        return letters


def strict_json(data: bytes) -> Any:
    """Parsed JSON; NaN and Infinity, which Python's parser takes, are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(data, parse_constant=refuse)


def users_by_partition(names: Iterable[str]) -> dict[int, list[str]]:
    """Users by the partition that Java's partitioner gives them."""
    from schemas.keys import partition_of

    shares: dict[int, list[str]] = defaultdict(list)
    for name in names:
        shares[partition_of(name, PARTITIONS)].append(name)
    return shares


def _environment(kafka: KafkaConfig) -> dict[str, str]:
    """A cluster's settings as the environment variables of a worker."""
    named = {
        "BOOTSTRAP": kafka.bootstrap, "TOPIC_PREFIX": kafka.topic_prefix, "SECURITY_PROTOCOL": kafka.security_protocol,
        "SASL_MECHANISM": kafka.sasl_mechanism, "SASL_USERNAME": kafka.sasl_username, "SASL_PASSWORD": kafka.sasl_password,
        "SSL_CA_LOCATION": kafka.ssl_ca_location,
    }  # fmt: skip
    return {f"SOLARIS_KAFKA__{name}": str(value) for name, value in named.items() if value is not None}

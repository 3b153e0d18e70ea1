"""From the [kafka] section to what both clients need, and to topics that exist.

In:  `KafkaConfig`; the table of topics in schemas/topics.py.
Out: settings for librdkafka (confluent-kafka) and for Faust (aiokafka); topics, created and checked.
Never: changes a topic that is there, or lets a co-partitioned pair differ in its partition count.

The clients are imported inside the functions, so that reading a configuration costs nothing.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from schemas.errors import ConfigError, FatalError, TopicError
from schemas.topics import TOPICS, TopicSpec

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError
    from confluent_kafka.admin import AdminClient

PARTITIONS_DEFAULT = 4
ADMIN_TIMEOUT_S = 30.0
ANSWER_S_MAX = 5.0
"""How long a client waits for the brokers' answer before it says that there is none."""
POLL_S = 0.1
LOG_INTERVAL_S = 10.0


@dataclass(frozen=True)
class KafkaConfig:
    """Which cluster, how to get in, and how our topics are called there. PEM files throughout."""

    bootstrap: str = "127.0.0.1:9092"
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-256"
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False, metadata={"secret": True})
    ssl_ca_location: Path | None = None
    ssl_certificate_location: Path | None = None
    ssl_key_location: Path | None = None
    ssl_key_password: str | None = field(default=None, repr=False, metadata={"secret": True})
    topic_prefix: str = "solaris."

    def __post_init__(self) -> None:
        if not self.bootstrap.strip():
            raise ConfigError("[kafka] bootstrap is empty: write host:port, several with commas.")
        if self.sasl and not (self.sasl_username and self.sasl_password):
            raise ConfigError(
                f"[kafka] security_protocol is {self.security_protocol}: set sasl_username, and the password by "
                "SOLARIS_KAFKA__SASL_PASSWORD or sasl_password_file."
            )
        if bool(self.ssl_certificate_location) != bool(self.ssl_key_location):
            raise ConfigError("[kafka] ssl_certificate_location and ssl_key_location belong together: set both.")

    @property
    def sasl(self) -> bool:
        return self.security_protocol.startswith("SASL")

    @property
    def tls(self) -> bool:
        return self.security_protocol.endswith("SSL")

    def topic(self, spec: TopicSpec) -> str:
        """The topic's name on the cluster."""
        return self.topic_prefix + spec.name


class _Sparingly(logging.Filter):
    """Lets a message through once in `LOG_INTERVAL_S`: librdkafka repeats itself many times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.getMessage().partition(" ")[0]  # "FAIL", "ERROR", …
        now = time.monotonic()
        if now - self._last.get(kind, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            return False
        self._last[kind] = now
        return True


CLIENT_LOG = logging.getLogger("solaris.kafka.client")
CLIENT_LOG.addFilter(_Sparingly())
_SILENT = logging.getLogger("solaris.kafka.probe")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


def librdkafka_settings(kafka: KafkaConfig, *, producer: bool = False) -> dict[str, Any]:
    """Settings for confluent-kafka's clients; `producer=True` adds the partitioner that Java's clients use."""
    settings: dict[str, Any] = {
        "bootstrap.servers": kafka.bootstrap,
        "security.protocol": kafka.security_protocol,
        "logger": CLIENT_LOG,
    }
    if producer:
        settings["partitioner"] = "murmur2_random"  # librdkafka's default (CRC32) sends a user elsewhere than Java's
    if kafka.sasl:
        settings |= {
            "sasl.mechanism": kafka.sasl_mechanism,
            "sasl.username": kafka.sasl_username,
            "sasl.password": kafka.sasl_password,
        }
    if kafka.tls:
        named = {
            "ssl.ca.location": kafka.ssl_ca_location,
            "ssl.certificate.location": kafka.ssl_certificate_location,
            "ssl.key.location": kafka.ssl_key_location,
            "ssl.key.password": kafka.ssl_key_password,
        }
        settings |= {name: str(value) for name, value in named.items() if value is not None}
    return settings


def faust_settings(kafka: KafkaConfig) -> dict[str, Any]:
    """Arguments of `faust.App`: where the brokers are and how to get in."""
    from faust import SASLCredentials, SSLCredentials

    settings: dict[str, Any] = {"broker": [f"kafka://{server.strip()}" for server in kafka.bootstrap.split(",")]}
    context = _ssl_context(kafka) if kafka.tls else None
    if kafka.sasl:
        settings["broker_credentials"] = SASLCredentials(
            username=kafka.sasl_username,
            password=kafka.sasl_password,
            mechanism=kafka.sasl_mechanism,
            ssl_context=context,
        )
    elif context is not None:
        settings["broker_credentials"] = SSLCredentials(context)
    return settings


def _ssl_context(kafka: KafkaConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=kafka.ssl_ca_location)
        if kafka.ssl_certificate_location:
            context.load_cert_chain(kafka.ssl_certificate_location, kafka.ssl_key_location, kafka.ssl_key_password)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"[kafka] a certificate or key can't be read: {error}.") from error
    return context


@contextmanager
def answered(kafka: KafkaConfig, asked: str) -> Iterator[None]:
    """What the client raises inside becomes one sentence, a `FatalError`: what was asked, where, what to do."""
    from confluent_kafka import KafkaException

    try:
        yield
    except KafkaException as error:
        raise FatalError(_no_answer(kafka, asked, error.args[0].str())) from error


def _no_answer(kafka: KafkaConfig, asked: str, said: str) -> str:
    return (
        f"Kafka at {kafka.bootstrap} ({kafka.security_protocol}) was asked for {asked}: {said}. Check that it runs "
        "(`solaris broker status`), [kafka] bootstrap, security_protocol, user, password and certificates."
    )


def partitions_of(consumer: Consumer, kafka: KafkaConfig, topic: str, timeout_s: float = ANSWER_S_MAX) -> list[int]:
    """The topic's partitions. `FatalError` without an answer within `timeout_s` seconds, `TopicError` without the topic."""
    with answered(kafka, f"the partitions of {topic}"):
        found = consumer.list_topics(topic, timeout=timeout_s).topics[topic].partitions
    if not found:
        raise TopicError(f"Topic {topic} is not there; create it with `solaris topics create`.")
    return sorted(found)


def passes(error: KafkaError) -> bool:
    """Whether to go on and see the fault pass: brokers come back and elect leaders. (`error.retriable()` is False for these.)"""
    from confluent_kafka import KafkaError as Code

    return error.code() in {
        Code._TRANSPORT, Code._ALL_BROKERS_DOWN, Code._TIMED_OUT, Code._PARTITION_EOF, Code._WAIT_COORD, Code._RESOLVE,
        Code.REQUEST_TIMED_OUT, Code.NETWORK_EXCEPTION, Code.BROKER_NOT_AVAILABLE, Code.LEADER_NOT_AVAILABLE,
        Code.NOT_LEADER_FOR_PARTITION, Code.NOT_COORDINATOR, Code.COORDINATOR_NOT_AVAILABLE, Code.COORDINATOR_LOAD_IN_PROGRESS,
        Code.UNKNOWN_LEADER_EPOCH, Code.FENCED_LEADER_EPOCH, Code.OFFSET_NOT_AVAILABLE,
    }  # fmt: skip


def probe(bootstrap: str, timeout_s: float) -> str | None:
    """The cluster id of the broker that answers there within `timeout_s` seconds, without TLS or SASL, or None."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    settings: dict[str, Any] = {"bootstrap.servers": bootstrap, "reconnect.backoff.max.ms": 200, "logger": _SILENT}
    try:
        metadata = AdminClient(settings).list_topics(timeout=timeout_s)
    except KafkaException:
        return None
    return metadata.cluster_id if metadata.brokers else None


class TopicAdmin:
    """Creates and checks our topics on one cluster; `timeout_s` bounds every call."""

    def __init__(self, kafka: KafkaConfig, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        self._kafka = kafka
        self._timeout_s = timeout_s
        self._complaints: list[str] = []
        settings = librdkafka_settings(kafka) | {
            "logger": _SILENT,
            "error_cb": lambda e: self._complaints.append(e.str()),
        }
        try:
            self._client: AdminClient = AdminClient(settings)
        except KafkaException as error:  # it reads the certificates already
            raise ConfigError(f"[kafka] Kafka's client refuses these settings: {error.args[0].str()}.") from error

    def partitions(self, table: Iterable[TopicSpec] = TOPICS) -> dict[str, int]:
        """Name on the cluster → partitions, for the topics of the table that are there."""
        found = self._metadata()
        names = [self._kafka.topic(spec) for spec in table]
        return {name: found[name] for name in names if name in found}

    def ids(self, table: Iterable[TopicSpec]) -> dict[str, tuple[str, int]]:
        """Name without the prefix → Kafka's topic id and the partition count. A topic that was made anew has another id."""
        from confluent_kafka import KafkaError, KafkaException, TopicCollection

        names = {self._kafka.topic(spec): spec.name for spec in table}
        timeout_s = min(ANSWER_S_MAX, self._timeout_s)
        futures = self._client.describe_topics(TopicCollection(list(names)), request_timeout=timeout_s)
        found = {}
        for name, future in futures.items():
            try:
                described = future.result()  # the request's own time ends it
            except KafkaException as error:
                if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise TopicError(f"Topic {name} is not there; create it with `solaris topics create`.") from error
                raise FatalError(_no_answer(self._kafka, f"the id of {name}", error.args[0].str())) from error
            found[names[name]] = (str(described.topic_id), len(described.partitions))
        return found

    def ensure(self, table: Iterable[TopicSpec] = TOPICS, partitions: int | None = None) -> dict[str, int]:
        """Create what is missing, wait until it is there, and return every topic's partitions.

        `partitions=None` takes the count of the topics that are there, or 4. Raises `TopicError` if topics that are there
        disagree or have another count than was asked for: growing it would part users from their state.
        """
        table = tuple(table)
        there = self.partitions(table)
        agreed = check_copartitioning(self._kafka, table, there)
        wanted = partitions or agreed or PARTITIONS_DEFAULT
        if agreed is not None and agreed != wanted:
            raise TopicError(
                f"{_first_copartitioned(self._kafka, table, there)} has {agreed} partitions and {wanted} were asked for: "
                "a changed count would part users from their state. Keep the count, or choose another "
                "[kafka] topic_prefix for a fresh set of topics."
            )
        self._create([spec for spec in table if self._kafka.topic(spec) not in there], wanted)
        return self._wait_until_visible(table)

    def _create(self, specs: list[TopicSpec], partitions: int) -> None:
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.cimpl import NewTopic  # admin has it too, but not for type checkers

        if not specs:
            return
        new = [
            # -1: the cluster's own default, which is the operator's decision
            NewTopic(self._kafka.topic(spec), partitions, replication_factor=-1, config=topic_settings(spec))
            for spec in specs
        ]
        for name, future in self._client.create_topics(new, operation_timeout=self._timeout_s).items():
            try:
                future.result(self._timeout_s)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another process was as quick
                    raise TopicError(f"Topic {name} can't be created: {error.args[0].str()}.") from error

    def _wait_until_visible(self, table: tuple[TopicSpec, ...]) -> dict[str, int]:
        """Creation returns when the controller knows; clients fail until the brokers do."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            there = self.partitions(table)
            missing = [self._kafka.topic(spec) for spec in table if self._kafka.topic(spec) not in there]
            if not missing:
                check_copartitioning(self._kafka, table, there)
                return there
            if time.monotonic() > deadline:
                raise TopicError(f"Created, but not seen within {self._timeout_s:g} s: {', '.join(missing)}.")
            time.sleep(POLL_S)

    def _metadata(self) -> dict[str, int]:
        """Every topic whose partitions all have a leader → its number of partitions."""
        from confluent_kafka import KafkaException

        timeout_s = min(ANSWER_S_MAX, self._timeout_s)
        try:
            topics = self._client.list_topics(timeout=timeout_s).topics
        except KafkaException as error:
            self._client.poll(0)
            # The exception says "transport failure" even for a wrong password; the callback was told more.
            said = self._complaints[0] if self._complaints else error.args[0].str()
            raise FatalError(_no_answer(self._kafka, "its topics", said)) from error
        return {
            name: len(topic.partitions)
            for name, topic in topics.items()
            if topic.partitions and all(partition.leader >= 0 for partition in topic.partitions.values())
        }


def ensure_topics(
    kafka: KafkaConfig, table: Iterable[TopicSpec] = TOPICS, partitions: int | None = None
) -> dict[str, int]:
    """`TopicAdmin(kafka).ensure(table, partitions)`."""
    return TopicAdmin(kafka).ensure(table, partitions)


def check_copartitioning(kafka: KafkaConfig, table: Iterable[TopicSpec], there: Mapping[str, int]) -> int | None:
    """The one partition count of the co-partitioned topics that are there, or None; unequal ones raise `TopicError`."""
    counts = [(name, there[name]) for name in (kafka.topic(s) for s in table if s.copartitioned) if name in there]
    if not counts:
        return None
    first, count = counts[0]
    for name, other in counts:
        if other != count:
            raise TopicError(
                f"{first} has {count} partitions and {name} has {other}: a user's records would meet in no worker. "
                "Give both the same count, or choose another [kafka] topic_prefix for a fresh set of topics."
            )
    return count


def topic_settings(spec: TopicSpec) -> dict[str, str]:
    """Kafka's settings of a topic of ours. Append time, because deadlines and quarantine compare it with `ts`."""
    settings = {"message.timestamp.type": "LogAppendTime", "cleanup.policy": "compact" if spec.compacted else "delete"}
    if spec.retention_ms is not None:
        settings["retention.ms"] = str(spec.retention_ms)
    return settings


def _first_copartitioned(kafka: KafkaConfig, table: Iterable[TopicSpec], there: Mapping[str, int]) -> str:
    return next(name for name in (kafka.topic(spec) for spec in table if spec.copartitioned) if name in there)

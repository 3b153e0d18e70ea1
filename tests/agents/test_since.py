"""Where a fold without a stamp begins, on a real broker: less is read, and every row that is live is the same."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from agents.kafka import KafkaConfig, librdkafka_settings
from agents.since import since
from schemas.inference import Embeddings, decode_embeddings, encode_embeddings
from solaris.broker import Broker
from streams.aggregate import Aggregate
from streams.cache import Cache
from streams.state.memory import MemoryStore
from streams.state.prune import state_hash
from streams.state.store import Transaction

NOW, HOUR, MINUTE = 1_780_000_000_000, 3_600_000, 60_000
WINDOW = 24 * HOUR

Write = Callable[[list[tuple[int, bytes]]], tuple[KafkaConfig, str]]


@pytest.fixture
def write(broker: Broker) -> Write:
    """Writes (append time, value) to a topic of one partition whose records carry their own time."""

    def written(records: list[tuple[int, bytes]]) -> tuple[KafkaConfig, str]:
        kafka, topic = KafkaConfig(bootstrap=broker.bootstrap), f"since-{secrets.token_hex(4)}"
        made = NewTopic(topic, 1, 1, config={"message.timestamp.type": "CreateTime", "retention.ms": "-1"})
        admin = AdminClient(librdkafka_settings(kafka))
        admin.create_topics([made])[topic].result(20)
        producer = Producer(librdkafka_settings(kafka, producer=True))
        for append_ms, value in records:
            producer.produce(topic, value, b"u", 0, timestamp=append_ms)
        assert producer.flush(30) == 0
        return kafka, topic

    return written


def vectors(number: int, as_of: int) -> bytes:
    user, items = f"u{number % 7}", [f"i{number % 11}", f"j{number % 5}"]
    codes = np.full((2, 4), 1 + number % 100, np.int8)
    return encode_embeddings(Embeddings(user, 7, as_of, number, items, np.ones(2, np.float32), codes))


def begin_of(kafka: KafkaConfig, topic: str, end: int, window_ms: int = WINDOW) -> int:
    return since(kafka, topic, 0, (0, end), window_ms, lambda value: decode_embeddings(value).as_of)


def live(kafka: KafkaConfig, topic: str, first: int, end: int) -> tuple[str, int]:
    """Hash over the live rows of a fold from `first`, and how many records it read."""
    cache, aggregate, store, now, read = Cache(4 * HOUR, 4), Aggregate(4), MemoryStore(), 0, 0
    consumer = Consumer(librdkafka_settings(kafka) | {"group.id": secrets.token_hex(4), "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, first)])
    while first + read < end:
        for message in consumer.consume(500, 1.0):
            assert message.error() is None
            one = decode_embeddings(message.value())
            txn = Transaction(store)
            aggregate.fold([one], cache.fold([one], txn)[1], txn)
            store.commit(txn)
            now, read = max(now, one.as_of), read + 1
    consumer.close()
    return state_hash(store, now, {**cache.rules(), **aggregate.rules()}), read


@pytest.mark.parametrize("lag_ms", [0, HOUR, -4 * MINUTE], ids=["on time", "lagging", "ahead"])
def test_less_is_read_and_the_live_rows_are_the_same(write: Write, lag_ms: int) -> None:
    count, step = 720, 10 * MINUTE  # five days
    times = [NOW + number * step for number in range(count)]
    jitter = np.random.default_rng(1).integers(0, 30 * MINUTE, count).tolist()
    kafka, topic = write([(at, vectors(n, at - lag_ms - max(0, lag_ms and jitter[n]))) for n, at in enumerate(times)])
    first = begin_of(kafka, topic, count)
    assert 0 < first < count - WINDOW // step
    assert first > count - (WINDOW + 3 * HOUR) // step
    whole, read = live(kafka, topic, 0, count)
    assert live(kafka, topic, first, count) == (whole, read - first)
    tight = live(kafka, topic, count - WINDOW // step // 2, count)[0]
    assert tight != whole, "a later start would show"


def test_an_old_log_that_is_played_now_begins_at_its_start(write: Write) -> None:
    kafka, topic = write([(NOW + n, vectors(n, NOW - 400 * 24 * HOUR + n * HOUR)) for n in range(100)])
    assert begin_of(kafka, topic, 100) == 0


def test_where_the_end_tells_no_time_the_log_s_start_is_taken(write: Write) -> None:
    kafka, topic = write([(NOW + n * HOUR, b"?") for n in range(100)])
    assert begin_of(kafka, topic, 100) == 0
    assert since(kafka, topic, 0, (100, 100), WINDOW, lambda value: decode_embeddings(value).as_of) == 100


def test_a_record_of_the_far_future_hides_nothing(write: Write) -> None:
    times = [NOW + n * HOUR for n in range(100)]
    kafka, topic = write([(at, vectors(n, at + (1000 * WINDOW if n == 99 else 0))) for n, at in enumerate(times)])
    assert 0 < begin_of(kafka, topic, 100) <= 100 - 24

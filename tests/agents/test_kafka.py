"""Settings of both clients, and topics on a real broker: created once, never changed, never unequal."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agents.kafka import (
    KafkaConfig,
    TopicAdmin,
    _Sparingly,
    check_copartitioning,
    ensure_topics,
    faust_settings,
    librdkafka_settings,
    topic_settings,
)
from schemas.errors import FatalError, TopicError
from schemas.topics import EMBEDDINGS, EVENTS, ITEMS, TOPICS

if TYPE_CHECKING:
    from solaris.broker import Broker


def test_a_plain_cluster_needs_no_credentials() -> None:
    kafka = KafkaConfig(bootstrap="a:1, b:2")
    settings = librdkafka_settings(kafka)
    assert settings["bootstrap.servers"] == "a:1, b:2"
    assert not [name for name in settings if name.startswith(("sasl", "ssl", "partitioner"))]
    assert faust_settings(kafka) == {"broker": ["kafka://a:1", "kafka://b:2"]}


def test_producers_place_a_user_where_java_s_clients_do() -> None:
    assert librdkafka_settings(KafkaConfig(), producer=True)["partitioner"] == "murmur2_random"


def test_credentials_reach_both_clients() -> None:
    kafka = KafkaConfig(
        security_protocol="SASL_PLAINTEXT", sasl_mechanism="SCRAM-SHA-512", sasl_username="u", sasl_password="p"
    )
    settings, credentials = librdkafka_settings(kafka), faust_settings(kafka)["broker_credentials"]
    assert (settings["sasl.mechanism"], settings["sasl.username"], settings["sasl.password"]) == (
        "SCRAM-SHA-512",
        "u",
        "p",
    )
    assert (credentials.mechanism.value, credentials.username, credentials.password) == ("SCRAM-SHA-512", "u", "p")


def test_certificates_reach_librdkafka_by_path() -> None:
    kafka = KafkaConfig(security_protocol="SSL", ssl_ca_location=Path("/ca.pem"))
    assert librdkafka_settings(kafka)["ssl.ca.location"] == "/ca.pem"


def test_librdkafka_says_one_thing_once_in_a_while() -> None:
    sparingly = _Sparingly()
    lines = ["FAIL broker 1 down", "FAIL broker 2 down", "ERROR all down", "FAIL broker 1 down"]
    records = [logging.LogRecord("x", logging.ERROR, "", 0, line, None, None) for line in lines]
    assert [sparingly.filter(record) for record in records] == [True, False, True, False]


def test_topic_settings_follow_the_table() -> None:
    assert topic_settings(EVENTS)["retention.ms"] == str(EVENTS.retention_ms)
    assert topic_settings(EVENTS)["message.timestamp.type"] == "LogAppendTime"
    assert topic_settings(ITEMS)["cleanup.policy"] == "compact"
    assert "retention.ms" not in topic_settings(ITEMS)


def test_unequal_counts_are_refused_with_both_names() -> None:
    there = {"solaris.events": 4, "solaris.items": 9, "solaris.embeddings": 8}
    with pytest.raises(TopicError, match=r"solaris\.events has 4 partitions and solaris\.embeddings has 8"):
        check_copartitioning(KafkaConfig(), TOPICS, there)
    assert check_copartitioning(KafkaConfig(), TOPICS, {"solaris.items": 9}) is None


def test_nobody_there_is_said(unused_tcp_port: int) -> None:
    with pytest.raises(FatalError, match=f"127.0.0.1:{unused_tcp_port}.*refused"):
        TopicAdmin(KafkaConfig(bootstrap=f"127.0.0.1:{unused_tcp_port}"), timeout_s=1).partitions()


def test_topics_are_created_with_their_settings_and_then_left_alone(broker: Broker, topic_prefix: str) -> None:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._config import ConfigResource
    from confluent_kafka.admin._resource import ResourceType

    kafka = KafkaConfig(bootstrap=broker.bootstrap, topic_prefix=topic_prefix)
    assert TopicAdmin(kafka).partitions() == {}
    wanted = {kafka.topic(spec): 3 for spec in TOPICS}
    assert ensure_topics(kafka, partitions=3) == wanted
    assert ensure_topics(kafka) == wanted  # without a count: as they are

    client = AdminClient(librdkafka_settings(kafka))
    for spec in TOPICS:
        resource = ConfigResource(ResourceType.TOPIC, kafka.topic(spec))
        (described,) = client.describe_configs([resource]).values()
        found = {name: entry.value for name, entry in described.result(10).items()}
        assert found.items() >= topic_settings(spec).items()


def test_a_changed_count_is_refused(broker: Broker, topic_prefix: str) -> None:
    kafka = KafkaConfig(bootstrap=broker.bootstrap, topic_prefix=topic_prefix)
    ensure_topics(kafka, [EVENTS], partitions=2)
    with pytest.raises(TopicError, match="events has 2 partitions and 4 were asked for"):
        ensure_topics(kafka, TOPICS, partitions=4)
    assert TopicAdmin(kafka).partitions() == {kafka.topic(EVENTS): 2}


def test_topics_that_disagree_already_stop_the_creation(broker: Broker, topic_prefix: str) -> None:
    kafka = KafkaConfig(bootstrap=broker.bootstrap, topic_prefix=topic_prefix)
    ensure_topics(kafka, [EVENTS], partitions=2)
    ensure_topics(kafka, [EMBEDDINGS], partitions=3)
    with pytest.raises(TopicError, match=r"events has 2 partitions and .*embeddings has 3"):
        ensure_topics(kafka)


def test_two_that_create_at_once_both_succeed(broker: Broker, topic_prefix: str) -> None:
    kafka = KafkaConfig(bootstrap=broker.bootstrap, topic_prefix=topic_prefix)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: ensure_topics(kafka, partitions=2), range(2))
    assert first == second

"""Kafka's clients and topics, as every process of ours needs them."""

from __future__ import annotations

import logging
from typing import Any

QUIET = logging.getLogger("solaris.kafka.client")


def probe(bootstrap: str, timeout_s: float) -> bool:
    """Whether a broker there answers a metadata request within `timeout_s` seconds, without TLS or SASL."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    settings: dict[str, Any] = {"bootstrap.servers": bootstrap, "reconnect.backoff.max.ms": 200}
    try:
        return bool(AdminClient(settings, logger=QUIET).list_topics(timeout=timeout_s).brokers)
    except KafkaException:
        return False

"""A log that ends with what no consumer is shown: a transaction's marker, and the records of one that was aborted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Producer

from agents.kafka import librdkafka_settings
from schemas.events import Event, encode_event
from schemas.ranking import RankingRequest
from schemas.topics import EVENTS
from tests.integration.installation import PARTITIONS, Installation

pytestmark = pytest.mark.timeout(180)


def _transact(here: Installation, producer: Producer, user: str, *, commit: bool) -> None:
    """One event onto each partition, in one transaction."""
    producer.begin_transaction()
    for partition in range(PARTITIONS):
        here.send(EVENTS, user.encode(), encode_event(Event(user, f"i{partition}", "click")), partition, producer)
    here.flush(producer)
    (producer.commit_transaction if commit else producer.abort_transaction)(30)


def test_serve_is_restored_though_the_log_ends_behind_a_marker(install: Callable[..., Installation]) -> None:
    here = install()
    settings = librdkafka_settings(here.kafka, producer=True) | {"transactional.id": here.kafka.topic_prefix}
    producer = Producer(settings)
    producer.init_transactions(30)
    _transact(here, producer, "u", commit=True)
    (serve,) = here.start("serve")
    _transact(here, producer, "u", commit=False)
    serve.stop()
    here.workers.remove(serve)
    here.start("serve")  # waits until it is ready: nothing that it could fold is missing
    here.ask(*(RankingRequest(f"r{user}", f"u{user}", ["i0", "i1"]) for user in range(16)))
    here.settle()
    assert {tuple(result.flags) for result in here.results().values()} == {()}
    assert here.dead_letters() == []

"""A worker that can't do its work says so in a sentence and ends, in bounded time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from schemas.topics import EMBEDDINGS, EVENTS
from tests.integration.fleet import Worker
from tests.integration.installation import PARTITIONS, ROLES, Installation

pytestmark = pytest.mark.timeout(120)


def _refused(here: Installation, bundle: Path | None = None, **settings: str) -> list[str]:
    """What one worker of each role says, all started at once; each must end by itself with 1 or 2, and without a traceback."""
    chosen = here.settings | settings
    workers = [Worker(role, role, bundle or here.bundle, here.folder, chosen) for role in ROLES]
    here.workers += workers
    codes = [worker.ended(40) for worker in workers]
    assert set(codes) <= {1, 2}, codes
    said = [worker.log() for worker in workers]
    assert [words for words in said if "Traceback" in words] == []
    return said


def test_without_a_bundle_no_worker_starts(install: Callable[..., Installation], tmp_path: Path) -> None:
    for said in _refused(install(), tmp_path / "none"):
        assert "solaris: " in said
        assert "is no bundle" in said
        assert "solaris train" in said


def test_missing_topics_are_named(install: Callable[..., Installation]) -> None:
    for said in _refused(install(), SOLARIS_KAFKA__TOPIC_PREFIX="nothing-here."):
        assert "nothing-here.events" in said
        assert "solaris topics create" in said


def test_unequal_partition_counts_are_refused_naming_both_topics(install: Callable[..., Installation]) -> None:
    here = install()
    name = here.kafka.topic(EMBEDDINGS)
    admin = AdminClient(here.client)
    admin.create_partitions([NewPartitions(name, PARTITIONS + 1)])[name].result(20)
    for said in _refused(here):
        assert f"{here.kafka.topic(EVENTS)} has {PARTITIONS} partitions" in said
        assert f"{name} has {PARTITIONS + 1}" in said


def test_a_broker_out_of_reach_is_said_in_bounded_time(install: Callable[..., Installation]) -> None:
    here = install()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    for said in _refused(here, SOLARIS_KAFKA__BOOTSTRAP=address):
        assert f"Kafka at {address}" in said
    assert time.monotonic() - began < 30

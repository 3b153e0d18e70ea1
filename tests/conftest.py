"""What every test may lean on: one real broker a run, topics of one's own, and nothing that hangs or leaks."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests share the cores with a broker

BROKER_FIXTURES = frozenset({"broker", "broker_dir"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks for a broker is a Kafka test, whether or not it says so: `-m "not kafka"` needs no Java."""
    for item in items:
        if BROKER_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.kafka)


@pytest.fixture(scope="session")
def broker() -> Iterator[object]:
    """One real Apache Kafka for the whole run, a `solaris.broker.Broker`; share it, don't kill it."""
    from solaris.broker import Broker

    # Not under pytest's own base directory: that keeps old runs, and a broker's data is large.
    with (
        tempfile.TemporaryDirectory(prefix="solaris-broker-") as directory,
        Broker.start(Path(directory), tied_to_us=True) as running,
    ):
        yield running


@pytest.fixture
def broker_dir() -> Iterator[Path]:
    """An empty directory for a broker of the test's own (to kill, pause or restart); what runs there is stopped."""
    from solaris.broker import Broker

    with tempfile.TemporaryDirectory(prefix="solaris-broker-") as directory:
        yield Path(directory)
        running = Broker.attach(Path(directory))
        if running is not None:
            running.kill()


@pytest.fixture
def topic_prefix() -> str:
    """A prefix for topics that no other test has."""
    return f"test-{secrets.token_hex(4)}."

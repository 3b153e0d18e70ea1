"""One small bundle, one small log, and an installation for whoever asks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agents.kafka import KafkaConfig
from models.bundle import untrained_bundle
from schemas.log import Log
from solaris.broker import Broker
from solaris.generate import generate
from solaris.world import GenerateConfig
from tests.integration.installation import Installation

USERS, ITEMS, DAYS = 30, 60, 0.8


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: what is tested is the path, not the prediction."""
    return untrained_bundle(1, content_dims=8).save(tmp_path_factory.mktemp("integration") / "bundle")


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """About a thousand events and a hundred requests of 30 users."""
    folder = tmp_path_factory.mktemp("integration") / "log"
    generate(GenerateConfig(users=USERS, items=ITEMS, days=DAYS, seed=3), folder)
    return Log(folder)


@pytest.fixture
def install(broker: Broker, bundle: Path) -> Iterator[Callable[..., Installation]]:
    """Makes installations; their workers are gone at the end of the test."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="solaris-integration-")))

        def make(**settings: str) -> Installation:
            kafka = KafkaConfig(bootstrap=broker.bootstrap)
            return stack.enter_context(Installation(kafka, bundle, folder, settings))

        yield make

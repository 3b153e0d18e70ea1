"""The whole path on a broker that asks for SASL over TLS, with nothing but the settings of a user."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.kafka import KafkaConfig
from schemas.events import Event, encode_event
from schemas.inference import decode_embeddings
from schemas.ranking import RankingRequest
from schemas.topics import EMBEDDINGS, EVENTS
from tests.integration.fleet import until
from tests.integration.installation import ROLES, Installation
from tests.solaris.test_broker_secured import needs_openssl, secured

__all__ = ["secured"]

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(150), needs_openssl]

START_MS = 1_767_225_600_000


def test_all_three_workers_get_in_and_do_their_work(secured: KafkaConfig, bundle: Path, tmp_path: Path) -> None:
    with Installation(secured, bundle, tmp_path) as here:
        workers = here.start(*ROLES)
        for number in range(20):
            event = Event("u", f"i{number % 5}", "click", START_MS + number)
            here.send(EVENTS, b"u", encode_event(event))
        here.flush()
        here.ask(RankingRequest("r1", "u", [f"i{number}" for number in range(5)], START_MS + 1_000))
        here.settle()
        until(lambda: here.end(EMBEDDINGS) > 0, 20, "embeddings")
        here.ask(RankingRequest("r2", "u", [f"i{number}" for number in range(5)], START_MS + 2_000))
        here.settle()
        vectors = [decode_embeddings(message.value()) for message in here.read(EMBEDDINGS)]
        assert {message.user for message in vectors} == {"u"}
        tiers = [item.tier for item in here.results()["u", "r2"].items]
        assert tiers.count("exact") > 0
        assert {worker.stop() for worker in workers} == {0}

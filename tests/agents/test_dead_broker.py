"""Where no broker listens: each client's first question ends in time, with a sentence that says where and what to do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.catalogue import Catalogue
from agents.kafka import ANSWER_S_MAX, KafkaConfig, TopicAdmin
from agents.lag import Lag
from agents.readback import read_back
from agents.results import ResultReader, rank
from schemas.errors import FatalError
from schemas.topics import EVENTS

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 0.4
SLACK_S = 15.0
"""On a busy machine; without a limit the clients wait for minutes."""

ASKED: dict[str, Callable[[KafkaConfig], object]] = {
    "topics": lambda kafka: TopicAdmin(kafka, WAIT_S).partitions(),
    "create": lambda kafka: TopicAdmin(kafka, WAIT_S).ensure(),
    "ids": lambda kafka: TopicAdmin(kafka, WAIT_S).ids([EVENTS]),
    "lag": lambda kafka: Lag(kafka, {"group": [kafka.topic(EVENTS)]}, WAIT_S),
    "results": lambda kafka: ResultReader(kafka, timeout_s=WAIT_S),
    "rank": lambda kafka: rank(kafka, "u", ["i"], timeout_s=WAIT_S),
    "catalogue": lambda kafka: Catalogue(kafka, lambda _items: None, timeout_s=WAIT_S),
    "read back": lambda kafka: read_back(kafka, kafka.topic(EVENTS), 0, None, 1_000, WAIT_S),
}


@pytest.mark.parametrize("who", list(ASKED))
def test_nobody_there_is_one_sentence(who: str, unused_tcp_port: int) -> None:
    nowhere = KafkaConfig(bootstrap=f"127.0.0.1:{unused_tcp_port}")
    began = time.monotonic()
    with pytest.raises(FatalError, match=rf"^Kafka at 127.0.0.1:{unused_tcp_port} .*Check that it runs"):
        ASKED[who](nowhere)
    assert time.monotonic() - began < WAIT_S + SLACK_S


def test_a_verb_without_a_broker_waits_as_long_as_the_constant_says(unused_tcp_port: int) -> None:
    line = [sys.executable, "-m", "solaris", "rank", "u", "i", "--bootstrap", f"127.0.0.1:{unused_tcp_port}"]
    began = time.monotonic()
    failed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"solaris: Kafka at 127.0.0.1:{unused_tcp_port}")
    assert len(failed.stderr.splitlines()) == 1
    assert time.monotonic() - began < ANSWER_S_MAX + SLACK_S

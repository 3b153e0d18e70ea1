"""More workers than partitions: the one that has none stands by, lives, and is healthy by the check of the compose file."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ruamel.yaml import YAML

from agents.kafka import KafkaConfig, ensure_topics
from tests.integration.fleet import Worker, until
from tests.integration.installation import QUICK

if TYPE_CHECKING:
    from solaris.broker import Broker

COMPOSE = Path(__file__).parents[2] / "docker-compose.yml"

pytestmark = pytest.mark.timeout(180)


def healthy(stats: Path) -> bool:
    """The healthcheck of the serve service, on this worker's stats."""
    test = YAML(typ="safe").load(COMPOSE.read_text())["services"]["serve"]["healthcheck"]["test"]
    assert test[0] == "CMD-SHELL"
    assert "/state/stats.json" in test[1]
    command = test[1].replace("$$", "$").replace("/state/stats.json", str(stats))
    return subprocess.run(["sh", "-c", command], stderr=subprocess.DEVNULL, timeout=30, check=False).returncode == 0


def test_a_worker_without_a_partition_is_healthy(broker: Broker, bundle: Path) -> None:
    kafka = KafkaConfig(bootstrap=broker.bootstrap, topic_prefix=f"test-{secrets.token_hex(4)}.")
    ensure_topics(kafka, partitions=1)
    settings = QUICK | {
        "SOLARIS_KAFKA__BOOTSTRAP": kafka.bootstrap,
        "SOLARIS_KAFKA__TOPIC_PREFIX": kafka.topic_prefix,
    }
    with tempfile.TemporaryDirectory(prefix="solaris-standby-") as name:
        folder = Path(name)
        first = Worker("serve", "first", bundle, folder, settings)
        workers = [first]
        try:
            first.wait_until_ready()
            workers.append(Worker("serve", "second", bundle, folder, settings))
            until(lambda: workers[1].facts, 60, workers[1].log)

            def shared_out() -> bool:
                return sorted(worker.counts.get("partitions", ()) for worker in workers) == [[], [0]]

            until(shared_out, 60, lambda: f"{[worker.facts for worker in workers]}")
            (standby,) = [worker for worker in workers if not worker.counts["partitions"]]
            seen = time.time()
            stats = folder / f"{standby.name}.json"
            until(lambda: stats.stat().st_mtime > seen + 1, 30, "its counts stand still")
            assert standby.facts["ready"] is False
            assert [healthy(folder / f"{worker.name}.json") for worker in workers] == [True, True]
            assert not healthy(folder / "absent.json")
        finally:
            for worker in workers:
                worker.kill()

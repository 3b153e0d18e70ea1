"""A real broker: it answers, keeps what it was given through a crash, runs once on a directory, and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents.kafka import KafkaConfig, TopicAdmin, ensure_topics
from schemas.errors import BrokerError
from schemas.topics import EVENTS
from solaris.broker import Broker, BrokerOptions, process
from solaris.broker.place import free_ports
from solaris.broker.properties import Ports

pytestmark = pytest.mark.timeout(150)


def test_a_broker_s_life(broker: Broker, broker_dir: Path) -> None:
    with Broker.start(broker_dir) as ours:
        kafka = KafkaConfig(bootstrap=ours.bootstrap)
        assert ours.bootstrap != broker.bootstrap  # two of them, side by side
        assert ensure_topics(kafka, [EVENTS], partitions=3) == {"solaris.events": 3}
        with pytest.raises(BrokerError, match="already runs on"):
            Broker.start(broker_dir)

        first, address = ours.pid, ours.bootstrap
        ours.kill()
        assert Broker.attach(broker_dir) is None
        ours.restart()
        assert (ours.bootstrap, ours.pid != first) == (address, True)
        assert TopicAdmin(kafka).partitions([EVENTS]) == {"solaris.events": 3}

        found = Broker.attach(broker_dir)
        assert found is not None
        assert (found.pid, found.bootstrap, found.alive) == (ours.pid, ours.bootstrap, True)
        ours.pause()
        found.stop()  # from another handle, and paused
        assert not ours.alive
        ours.stop()  # and once more
    assert Broker.attach(broker_dir) is None


def test_a_port_lost_between_finding_and_binding_is_replaced(
    broker: Broker, broker_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Ports] = []

    def first_one_is_taken(host: str, port: int) -> Ports:
        ports = free_ports(host, port)
        tries.append(ports)
        return Ports(broker.ports.client, ports.controller, ports.internal) if len(tries) == 1 else ports

    monkeypatch.setattr(process, "free_ports", first_one_is_taken)
    with Broker.start(broker_dir) as ours:
        assert len(tries) == 2
        assert ours.ports == tries[1]


def test_a_broker_that_cannot_start_shows_its_last_lines(broker_dir: Path) -> None:
    with pytest.raises(BrokerError, match=r"num\.partitions"):
        Broker.start(broker_dir, options=BrokerOptions(overrides={"num.partitions": "many"}))
    assert Broker.attach(broker_dir) is None


def test_the_command_line_starts_finds_and_stops_one(broker_dir: Path) -> None:
    def solaris(*arguments: str) -> tuple[int, dict[str, object]]:
        command = [sys.executable, "-m", "solaris", "broker", *arguments, "--data-dir", str(broker_dir), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        return done.returncode, json.loads(done.stdout or "{}")

    assert solaris("status") == (1, {"running": False})
    code, started = solaris("start", "--port", "0", "--detach")
    assert code == 0
    assert solaris("status") == (0, started)
    assert solaris("stop") == (0, {"stopped": True, "running": False})
    assert solaris("stop") == (0, {"stopped": False, "running": False})


def test_ctrl_c_ends_a_broker_in_the_foreground(broker_dir: Path) -> None:
    command = [sys.executable, "-m", "solaris", "broker", "start", "--port", "0", "--data-dir", str(broker_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert "Kafka answers at" in shell.stdout.readline()
        os.kill(shell.pid, signal.SIGINT)
        assert shell.wait(30) == 0
    assert Broker.attach(broker_dir) is None

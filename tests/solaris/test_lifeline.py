"""A child ends with its parent, also where the parent gets SIGKILL and can't say good-bye."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from models.bundle import untrained_bundle
from solaris.broker import Broker
from solaris.lifeline import tied

ROOT = Path(__file__).resolve().parents[2]
ENDS_S_MAX = 40.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux' kernel ties a process to its parent")

DEMO = """
import sys, time
from pathlib import Path
from agents.kafka import KafkaConfig, ensure_topics
from solaris.broker import Broker
from solaris.workers import Workers
folder = Path(sys.argv[1])
broker = Broker.start(folder / "broker", tied_to_us=True)
ensure_topics(KafkaConfig(bootstrap=broker.bootstrap), partitions=1)
workers = Workers(folder / "bundle", folder, {"SOLARIS_KAFKA__BOOTSTRAP": broker.bootstrap}, ("infer",))
workers.start("infer")
workers.wait_until_ready()
print(broker.pid, workers.pid("infer"), flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether it runs; one that nobody has collected yet doesn't."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: list[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def killed(pids: list[int]) -> None:
    for pid in filter(alive, pids):
        os.kill(pid, signal.SIGKILL)


def test_the_command_runs_under_the_same_process_id_and_says_its_exit_code() -> None:
    code = "import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(7)"
    child = subprocess.Popen(tied([sys.executable, "-c", code, "a b"]), stdout=subprocess.PIPE, text=True)
    said, _ = child.communicate(timeout=60)
    assert (said.split(maxsplit=1), child.returncode) == ([str(child.pid), "a b\n"], 7)


def test_one_that_lost_its_parent_before_the_tie_ends_too() -> None:
    line = tied([sys.executable, "-c", "import time; time.sleep(600)"])
    line[line.index(str(os.getpid()))] = "1"  # as if our process had ended and another had taken the child over
    child = subprocess.Popen(line)
    try:
        assert child.wait(60) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()


@pytest.mark.kafka
@pytest.mark.timeout(240)
def test_broker_and_worker_end_when_what_started_them_gets_sigkill() -> None:
    with tempfile.TemporaryDirectory(prefix="solaris-lifeline-") as name:
        untrained_bundle(1, content_dims=8).save(Path(name) / "bundle")
        parent = subprocess.Popen([sys.executable, "-c", DEMO, name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        pids: list[int] = []
        try:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2
            assert all(map(alive, pids))
            parent.kill()
            parent.wait()
            assert gone(pids, ENDS_S_MAX)
            assert Broker.attach(Path(name) / "broker") is None
        finally:
            parent.kill()
            parent.communicate()
            killed(pids)
            gone(pids, ENDS_S_MAX)

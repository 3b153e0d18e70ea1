"""The batch transport on a real Kafka, several workers: partitions move whole, nothing is lost, nothing handed on is repeated."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.group import LeaveGroupRequest

from .kafka_log import Log, WorkerProcess, until, values, workers

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]


@pytest.fixture
def log(broker: Any) -> Log:
    return Log(broker.bootstrap)


def held(worker: WorkerProcess) -> set[int]:
    """The partitions whose processors live in `worker`."""
    here: set[int] = set()
    for told in list(worker.events):
        if told["event"] == "made":
            here.add(told["partition"])
        elif told["event"] == "closed":
            here.discard(told["partition"])
    return here


def assert_copartitioned(log: Log, *started: WorkerProcess) -> None:
    """Each assignment brought all topics of its partition (the worker itself stops if not; here it is seen from outside)."""
    for worker in started:
        for told in worker.told("assigned"):
            assert told["topics"] == sorted(log.inputs)


@pytest.mark.parametrize("count", [2, 3])
def test_workers_join_and_leave_and_every_record_is_answered_once(log: Log, count: int) -> None:
    """At 3 workers x 4 partitions round-robin would split the topics of a partition; at 2 it would not."""
    wanted: list[bytes] = []
    stop = threading.Event()

    def keep_producing() -> None:
        while not stop.is_set():
            for topic in (0, 1):
                wanted.extend(log.produce(200, topic, first=len(wanted)))
            time.sleep(0.1)

    producing = threading.Thread(target=keep_producing)
    producing.start()
    try:
        with workers() as start:
            started = [start(log.options()) for _ in range(count)]
            until(lambda: all(held(worker) for worker in started), what="a share for each")
            until(lambda: sum(len(held(worker)) for worker in started) == log.partitions, what="four partitions in all")
            time.sleep(1)
            assert set.union(*map(held, started)) == set(range(log.partitions))
            assert started[0].stop() == 0
            until(lambda: set.union(*map(held, started[1:])) == set(range(log.partitions)), what="its share moved on")
            started.append(start(log.options()))
            until(lambda: held(started[-1]), what="a share for the new one")
            stop.set()
            producing.join()
            got = values(log.read(log.output, len(wanted)))
            until(lambda: log.lag() == 0, what="lag 0")
            assert [worker.stop() for worker in started[1:]] == [0] * count
    finally:
        stop.set()
        producing.join()
    assert Counter(got) == Counter(wanted)
    assert_copartitioned(log, *started)


def test_a_batch_at_work_ends_and_is_committed_before_its_partition_goes(log: Log) -> None:
    wanted = log.produce(400)
    with workers() as start:
        first = start(log.options(async_s=2.0, rows_max=100))
        until(lambda: log.read(log.output, 1, timeout_s=0.2, settle_s=0) or first.told("assigned"), what="work")
        time.sleep(0.5)
        second = start(log.options())
        until(lambda: held(second), what="a share for the second")
        got = values(log.read(log.output, 400))
        assert Counter(got) == Counter(wanted)
        assert first.stop() == 0
        assert second.stop() == 0
    assert_copartitioned(log, first, second)


def test_a_worker_paused_past_its_session_comes_back_and_spoils_nothing(log: Log) -> None:
    wanted = log.produce(6_000)
    with workers() as start:
        first = start(log.options(rows_max=20, sleep_s=0.02))
        until(lambda: any(log.committed().values()), what="a first commit")
        first.send(signal.SIGSTOP)
        second = start(log.options(rows_max=20, sleep_s=0.005))
        until(lambda: len(held(second)) == log.partitions, 40, "everything with the second")
        until(lambda: log.lag() < 3_000, what="half done by the second")
        before = log.committed()
        first.send(signal.SIGCONT)
        for _ in range(10):
            now = log.committed()
            assert all(now[place] >= offset for place, offset in before.items())
            before = now
            time.sleep(0.2)
        wanted += log.produce(400, first=6_000)
        until(lambda: log.lag() == 0, what="lag 0")
        until(lambda: len(held(first)) + len(held(second)) >= log.partitions, what="both at work again")
        assert set(values(log.read(log.output, len(wanted)))) == set(wanted)
        assert first.stop() == 0
        assert second.stop() == 0
    assert_copartitioned(log, first, second)


def test_a_refused_commit_does_not_advance_and_the_work_is_done_again(log: Log) -> None:
    """The member is thrown out behind its back, so its next commit is refused."""
    wanted = log.produce(2_000)
    with workers() as start:
        worker = start(log.options(rows_max=20, sleep_s=0.02, transport={"heartbeat_ms": 2_000}), LEVEL="INFO")
        until(lambda: any(log.committed().values()), what="a first commit")
        (group,) = (f.result(10) for f in log.admin.describe_consumer_groups([log.group]).values())
        asyncio.run(_throw_out(log, group.members[0].member_id))
        until(lambda: any("refused a commit" in line for line in list(worker.log)), what="a refused commit")
        until(lambda: log.lag() == 0, 40, "lag 0 as a new member")
        assert set(values(log.read(log.output, 2_000))) == set(wanted)
        assert worker.stop() == 0
    assert len(worker.told("assigned")) == 2 * log.partitions
    assert len(worker.told("made")) == log.partitions  # it kept its processors through the rebalance


async def _throw_out(log: Log, member: str) -> None:
    client = AIOKafkaClient(bootstrap_servers=log.bootstrap)
    await client.bootstrap()
    try:
        node = await client.coordinator_lookup(0, log.group)
        await client.send(node, LeaveGroupRequest(log.group, member))
    finally:
        await client.close()

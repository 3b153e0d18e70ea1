"""The batch transport on a real Kafka, one worker: nothing lost, nothing committed that is not done, nothing that stalls."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from confluent_kafka import Producer

from agents.app import partition_count
from agents.kafka import KafkaConfig
from schemas.errors import TopicError

from .kafka_log import Log, until, values, workers

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]


@pytest.fixture
def log(broker: Any) -> Log:
    return Log(broker.bootstrap)


def test_a_killed_worker_loses_nothing(log: Log) -> None:
    wanted = set(log.produce(4_000, topic=0)) | set(log.produce(4_000, topic=1))
    with workers() as start:
        first = start(log.options(rows_max=50, sleep_s=0.02))
        until(lambda: any(log.committed().values()), what="a first commit")
        first.stop(signal.SIGKILL)
        assert 0 < sum(log.committed().values()) < 8_000
        second = start(log.options())
        got = values(log.read(log.output, 8_000, settle_s=0))
        until(
            lambda: set(got) == wanted or set(values(log.read(log.output, 8_000))) == wanted,
            what="every record answered",
        )
        until(lambda: log.lag() == 0, what="lag 0")
        assert second.stop() == 0


def test_a_stopped_worker_repeats_nothing_and_hands_on_its_mark(log: Log) -> None:
    wanted = sorted(log.produce(6_000))
    with workers() as start:
        first = start(log.options(rows_max=50, sleep_s=0.01))
        until(lambda: any(log.committed().values()), what="a first commit")
        assert first.stop() == 0
        assert len(first.told("closed")) == log.partitions
        assert 0 < log.lag() < 6_000
        second = start(log.options())
        assert sorted(values(log.read(log.output, 6_000))) == wanted
        assert second.stop(signal.SIGINT) == 0
        assert log.lag() == 0
    for told in second.told("assigned"):
        offset, mark = told["committed"][log.inputs[0]], told["marks"][log.inputs[0]]
        assert int(mark or 0) == (offset or 0)  # one output a record: what the first had sent is what it had committed


def test_gaps_of_transactions_do_not_stall_commits(log: Log) -> None:
    """Committed and aborted transactions leave offsets without a record, also at the very end of the log."""
    producer = Producer({**log.client, "transactional.id": log.group})
    producer.init_transactions(30)
    wanted = []
    for round_ in range(6):
        producer.begin_transaction()
        for index in range(40):
            value = b"%d-%d" % (round_, index)
            producer.produce(log.inputs[0], value, b"key", index % log.partitions)
            if round_ % 2 == 0:
                wanted.append(value)
        if round_ % 2 == 0:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
    with workers() as start:
        worker = start(log.options())
        assert sorted(values(log.read(log.output, len(wanted)))) == sorted(wanted)
        until(lambda: log.lag() == 0, 10, "lag 0 behind an aborted transaction")
        log.put(b"after")
        until(lambda: log.lag() == 0, 10, "lag 0 after one more record")
        assert worker.stop() == 0


def test_gaps_of_compaction_do_not_stall_commits(broker: Any) -> None:
    log = Log(broker.bootstrap, config={
        "cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01",
        "min.compaction.lag.ms": "0", "max.compaction.lag.ms": "100", "delete.retention.ms": "0",
    }, partitions=1)  # fmt: skip
    for round_ in range(8):
        log.produce(50, first=50 * round_)
        time.sleep(0.15)
    until(lambda: len(log.read(log.inputs[0], 400, timeout_s=1, settle_s=0)) < 300, 60, "the cleaner's work")
    with workers() as start:
        worker = start(log.options(rows_max=7))
        until(lambda: log.lag() == 0, what="lag 0 across compacted offsets")
        assert worker.stop() == 0
    assert values(log.read(log.output, 1))[-1] == b"0-399"


def test_compressed_topics_are_read(log: Log) -> None:
    wanted: list[bytes] = []
    for first, codec in enumerate(("lz4", "zstd", "snappy", "gzip")):
        wanted += log.produce(400, first=400 * first, settings={"compression.type": codec})
    with workers() as start:
        worker = start(log.options())
        assert sorted(values(log.read(log.output, 1_600, settle_s=0))) == sorted(wanted)
        assert worker.stop() == 0


def test_a_bad_record_costs_only_itself(log: Log) -> None:
    wanted = log.produce(1_000)
    log.put(b"poison", partition=2)
    wanted += log.produce(1_000, first=1_000)
    with workers() as start:
        worker = start(log.options())
        assert sorted(values(log.read(log.output, 2_000))) == sorted(wanted)
        dead = log.read(log.dead, 1, settle_s=0)
        assert [message.key() for message in dead] == [f"{log.inputs[0]}:2:250".encode()]
        until(lambda: log.lag() == 0, 10, "lag 0 past the bad record")
        assert worker.stop() == 0


def test_a_fatal_fault_ends_the_process_and_commits_nothing_after_it(log: Log) -> None:
    wanted = log.produce(400)
    with workers() as start:
        worker = start(log.options())
        until(lambda: log.lag() == 0, what="lag 0")
        log.put(b"fatal", partition=1)
        assert worker.ended() == 1
        assert "the disk is full" in "".join(worker.log)
        assert log.lag() == 1
    assert sorted(values(log.read(log.output, 400))) == sorted(wanted)


def test_the_processors_positions_count_and_not_the_committed_offset(log: Log) -> None:
    log.produce(400)
    log.rewind({(log.inputs[0], partition): 90 for partition in range(log.partitions)})
    with workers() as start:
        worker = start(log.options(positions={log.inputs[0]: 60}))
        got = log.read(log.output, 160)
        assert len(got) == 160
        assert log.lag() == 0
        assert worker.stop() == 0
    assert {told["committed"][log.inputs[0]] for told in worker.told("assigned")} == {90}


def test_reading_again_below_the_commit_does_not_rewind_it(log: Log) -> None:
    log.produce(400)
    log.rewind({(log.inputs[0], partition): 90 for partition in range(log.partitions)})
    with workers() as start:
        worker = start(log.options(positions={log.inputs[0]: 0}, rows_max=5, sleep_s=0.05, say_batches=True))
        until(lambda: len(worker.told("batch")) > 4, what="work below the commit")
        for _ in range(20):
            assert min(offset for (topic, _), offset in log.committed().items() if topic == log.inputs[0]) >= 90
            time.sleep(0.1)
        assert worker.stop() == 0


def test_a_slow_handler_is_waited_for_in_bounded_memory_and_without_a_rebalance(log: Log) -> None:
    """120 MB wait in the log; a call blocks for longer than the session."""
    log.produce(60_000, size=2_000)
    with workers() as start:
        worker = start(log.options(rows_max=100, sleep_s=7.0, say_batches=True))
        until(lambda: len(worker.told("batch")) >= 2, 40, "a second batch after a call of 7 s")
        assert worker.rss_mb() < 220
        assert len(worker.told("assigned")) == log.partitions
        until(lambda: any(log.committed().values()), what="a commit by the same member")
        worker.kill()


def test_a_broker_that_stays_away_ends_the_worker_before_anything_is_committed(broker_dir: Any) -> None:
    from solaris.broker import Broker

    with Broker.start(broker_dir) as broker, workers() as start:
        log = Log(broker.bootstrap)
        worker = start(
            log.options(async_s=1.0, say_batches=True, transport={"delivery_ms_max": 2_000, "barrier_ms_max": 3_000})
        )
        until(lambda: worker.told("assigned"), what="an assignment")
        log.produce(40)
        until(lambda: worker.told("batch"), what="work that a broker which is away can't take")
        broker.pause()
        try:
            assert worker.ended(25) == 1
        finally:
            broker.resume()
        assert "was not acknowledged within" in "".join(worker.log)
        assert log.lag() == 40


def test_the_start_is_refused_in_a_sentence_when_topics_are_missing_or_differ(log: Log) -> None:
    kafka = KafkaConfig(bootstrap=log.bootstrap)
    with workers() as start:
        worker = start(log.options() | {"inputs": [log.inputs[0], "no-such-topic"]})
        assert worker.ended() == 1
        (told,) = worker.told("refused")
        assert told["kind"] == "TopicError"
        assert told["error"].startswith("topics are missing: no-such-topic.")
    other = Log(log.bootstrap, partitions=3)
    with pytest.raises(TopicError, match=r"has 4 partitions and .* has 3"):
        partition_count(kafka, [log.inputs[0], other.inputs[0]])
    assert partition_count(kafka, log.inputs) == 4

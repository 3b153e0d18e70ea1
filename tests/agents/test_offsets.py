"""What the shells do with offsets when the broker says no, and how much of the past they hold; without a broker."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from agents import readback
from agents.infer import InferWorker
from agents.kafka import KafkaConfig
from agents.serve import ServeProcessor
from agents.stats import StatsFile
from agents.transport.wiring import TransportConfig
from schemas.errors import FatalError
from schemas.topics import EMBEDDINGS, EVENTS
from streams.dispatch import InferConfig

NOWHERE = KafkaConfig(bootstrap="127.0.0.1:1")


class Group:
    """The consumer, as far as commits go; refuses the first `refusals`."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.committed: list[dict[int, int]] = []

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert not asynchronous
        if self.refusals:
            self.refusals -= 1
            raise KafkaException(KafkaError(KafkaError.REBALANCE_IN_PROGRESS))
        self.committed.append({at.partition: at.offset for at in offsets})


class Finished:
    """The dispatcher, as far as commits go."""

    def __init__(self, *moves: dict[int, int]) -> None:
        self.moves = list(moves)

    def done(self, batch: object) -> None: ...

    def revoke(self, partitions: object) -> None: ...

    def finished(self) -> dict[int, int]:
        return self.moves.pop(0) if self.moves else {}


def worker(group: Group, *moves: dict[int, int]) -> InferWorker:
    made = InferWorker(
        NOWHERE, InferConfig(), TransportConfig(), cast(Any, None), cast(Any, None), StatsFile(None, "infer", lambda: (True, {}))
    )  # fmt: skip
    made._consumer.close()
    made._consumer, made._dispatcher = cast(Any, group), cast(Any, Finished(*moves))
    return made


def test_a_refused_commit_is_made_again_though_nothing_new_came() -> None:
    group = Group(refusals=2)
    infer = worker(group, {0: 7, 1: 3}, {1: 4})
    for _ in range(4):
        infer._commit()
    assert group.committed == [{0: 7, 1: 4}], "once, with the newest of both, and not again"


@pytest.mark.parametrize("leave", ["_on_revoke", "_on_lost"])
def test_nothing_is_committed_later_for_a_partition_that_went(leave: str) -> None:
    group = Group(refusals=2)
    infer = worker(group, {0: 7, 1: 3})
    infer._commit()
    getattr(infer, leave)(None, [TopicPartition("t", 0)])
    group.refusals = 0
    infer._commit()
    assert group.committed == [{1: 3}]


class Message:
    def __init__(self, offset: int, value: bytes) -> None:
        self._offset, self._value = offset, value

    def error(self) -> None: ...

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return self._value


class Results:
    """A consumer of ten results of 100 bytes each."""

    def assign(self, partitions: object) -> None: ...

    def consume(self, rows: int, timeout_s: float) -> list[Message]:  # noqa: ARG002 - the client's signature
        return [Message(offset, b"%100d" % offset) for offset in range(10)]

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        return [TopicPartition(at.topic, at.partition, 10) for at in partitions]


@pytest.mark.parametrize(("bytes_max", "kept"), [(1_000, range(10)), (350, range(7, 10)), (99, range(0))])
def test_of_too_many_answers_the_newest_are_read_back(bytes_max: int, kept: range) -> None:
    values = readback._values(cast(Any, Results()), "t", 0, 0, 10, bytes_max)
    assert [int(value) for value in values] == list(kept)


def serving() -> Any:
    """A serve processor without bundle and state, as far as `_take_up` and `positions` look."""
    made: Any = ServeProcessor.__new__(ServeProcessor)
    made.core = SimpleNamespace(items_applied=0, install=None, remember=None)
    made._context = SimpleNamespace(catalogue=SimpleNamespace(offset=0), state_dir=Path("state"))
    made._older, made._building, made._cut = queue.SimpleQueue(), None, None
    return made


@pytest.mark.parametrize("what", ["answers", "neighbours"])
def test_what_fails_in_a_thread_beside_serve_is_blamed_on_no_record(what: str) -> None:
    failed: Future[Any] = Future()
    failed.set_exception(MemoryError("no room"))
    processor = serving()
    if what == "answers":
        processor._older.put(failed)
    else:
        processor._building = failed
    with pytest.raises(FatalError, match=f"{what}.*no room"):
        processor._take_up()


def test_state_past_the_end_of_its_log_is_refused_by_name() -> None:
    processor = serving()
    processor._kafka, processor._partition, processor._due = NOWHERE, 2, {}
    processor._store = SimpleNamespace(stamp={EVENTS.name: 10, EMBEDDINGS.name: 6}.get)
    names = [NOWHERE.topic(spec) for spec in (EVENTS, EMBEDDINGS)]
    start = SimpleNamespace(begin=dict.fromkeys(names, 0), end=dict(zip(names, (10, 5), strict=True)))
    with pytest.raises(
        FatalError, match=r"solaris.embeddings-2: .* offset 5, but the log ends at 5.* Move state/2 away"
    ):
        processor.positions(start)

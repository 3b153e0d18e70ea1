"""The runner without Kafka: bisecting, dead letters, outputs that leave with the call that sent them, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Mapping
from typing import Any, cast

import numpy as np
import pytest

from agents.shell import handler_error
from agents.transport.batch import RecordBatch
from agents.transport.ledger import Ledger
from agents.transport.output import HeldOutput, Output
from agents.transport.partition import PartitionStart
from agents.transport.runner import Runner, Seat
from schemas.errors import BadRecord, ConfigError, FatalError, StateError


class FakeOutput:
    """Keeps what is released; never acknowledges."""

    def __init__(self) -> None:
        self.sent: list[bytes | None] = []

    def partition(self) -> HeldOutput:
        return HeldOutput(cast(Output, self), record_bytes_max=100)

    def reached(self, topic: str, partition: int) -> int | None:  # noqa: ARG002
        return None

    async def release(self, held: deque[Any]) -> None:
        while held:
            self.sent.append(held.popleft()[3])


class Shell:
    """Sends each value on; `raises` maps a value to how often it raises (-1 = always)."""

    def __init__(self, output: HeldOutput, raises: dict[bytes, int] | None = None) -> None:
        self.output = output
        self.raises = raises or {}
        self.calls: list[tuple[str, list[bytes | None]]] = []
        self.gate: asyncio.Event | None = None

    def positions(self, start: PartitionStart) -> Mapping[str, int | None]:  # noqa: ARG002
        return {}

    def process(self, batch: RecordBatch) -> Awaitable[Any] | None:
        self.calls.append((batch.topic, list(batch.values)))
        for value in batch.values:
            assert value is not None
            self.output.send("out", 0, None, value)
            if self.raises.get(value, 0):
                self.raises[value] -= 1
                raise ValueError(f"can't read {value!r}")
        return self.gate.wait() if self.gate is not None else None

    def on_poison(self, batch: RecordBatch, index: int, error: Exception) -> None:
        self.output.send("dead", 0, str(batch.record(index).offset).encode(), f"dead: {error}".encode())

    def mark(self, topic: str) -> str:
        return f"{topic} mark"

    def close(self) -> None:
        """Nothing is open."""


def batch_of(values: list[bytes], topic: str = "a", partition: int = 0, first: int = 0, step: int = 1) -> RecordBatch:
    count = len(values)
    offsets = first + step * np.arange(count, dtype=np.int64)
    return RecordBatch(
        topic, partition, offsets, [None] * count, values, offsets, True, [()] * count, int(offsets[-1]) + 5
    )


class Bench:
    """A ledger, a runner, and one seat for each of two partitions."""

    def __init__(self, raises: dict[bytes, int] | None = None, retries: int = 2) -> None:
        self.output = FakeOutput()
        self.ledger = Ledger()
        self.fatal: list[BaseException] = []
        self.done = 0
        self.runner = Runner(self.ledger, {"a": 0, "urgent": -1}, self._on_done, self.fatal.append, retries)
        self.shells: list[Shell] = []
        for partition in (0, 1):
            held = self.output.partition()
            self.shells.append(Shell(held, raises))
            self.runner.seats[partition] = Seat(self.shells[partition], held)
            for topic in ("a", "urgent"):
                self.ledger.assign((topic, partition), 0, None)

    def _on_done(self) -> None:
        self.done += 1

    def submit(self, batch: RecordBatch) -> None:
        ticket = self.ledger.add((batch.topic, batch.partition), batch.next_offset)
        assert ticket is not None
        self.runner.submit(batch, ticket)

    async def finish(self, wanted: int) -> None:
        self.runner.start()
        async with asyncio.timeout(5):
            while self.done < wanted and not self.fatal:
                await asyncio.sleep(0.001)
        await self.runner.stop()


@pytest.mark.parametrize("bad", [0, 3, 9], ids=["first", "middle", "last"])
async def test_one_bad_record_is_dead_lettered_and_the_others_are_answered_once(bad: int) -> None:
    values = [b"%d" % index for index in range(10)]
    bench = Bench({values[bad]: -1})
    bench.submit(batch_of(values))
    await bench.finish(1)
    good = [value for value in values if value != values[bad]]
    assert [value for value in bench.output.sent if value in values] == good
    assert [value for value in bench.output.sent if value not in values] == [b"dead: can't read %r" % values[bad]]
    assert bench.ledger.committable(lambda _: "")[("a", 0)].offset == 14
    assert bench.runner.poisoned == 1


async def test_every_record_bad_still_ends_the_batch() -> None:
    values = [b"%d" % index for index in range(7)]
    bench = Bench(dict.fromkeys(values, -1))
    bench.submit(batch_of(values))
    await bench.finish(1)
    assert len(bench.output.sent) == bench.runner.poisoned == 7
    assert bench.ledger.depth(("a", 0)) == 0


async def test_a_fault_that_passes_costs_no_record() -> None:
    """Once for the batch of two, once for the half, twice more alone: the third try alone succeeds."""
    bench = Bench({b"1": 3})
    bench.submit(batch_of([b"0", b"1"]))
    await bench.finish(1)
    assert bench.output.sent == [b"0", b"1"]
    assert bench.runner.poisoned == 0


@pytest.mark.parametrize("fault", [FatalError, StateError, MemoryError])
async def test_a_fault_of_ours_stops_and_nothing_of_the_batch_is_sent_or_done(fault: type[Exception]) -> None:
    bench = Bench()

    def process(batch: RecordBatch) -> None:
        bench.shells[0].output.send("out", 0, None, batch.values[0])
        raise fault("the disk is full")

    bench.shells[0].process = process  # type: ignore[method-assign]
    bench.submit(batch_of([b"0", b"1"]))
    await bench.finish(1)
    assert [str(error) for error in bench.fatal] == ["the disk is full"]
    assert bench.output.sent == []
    assert bench.runner.poisoned == 0
    assert bench.ledger.committable(lambda _: "")[("a", 0)].offset == 0


@pytest.mark.parametrize(
    "fault", [BadRecord("vector", "of another size"), KeyError("x"), ValueError("no"), ConfigError("no")]
)
async def test_a_fault_of_the_record_is_dead_lettered_and_stops_nothing(fault: Exception) -> None:
    bench = Bench()
    whole = bench.shells[0].process

    def process(batch: RecordBatch) -> Awaitable[Any] | None:
        if b"bad" in batch.values:
            raise fault
        return whole(batch)

    bench.shells[0].process = process  # type: ignore[method-assign]
    bench.submit(batch_of([b"0", b"bad", b"2"]))
    await bench.finish(1)
    assert bench.fatal == []
    assert bench.output.sent == [b"0", f"dead: {fault}".encode(), b"2"]


def test_a_dead_letter_keeps_the_reason_that_the_operator_found() -> None:
    assert handler_error(BadRecord("vector", "of another size")).reason == "vector"
    assert handler_error(KeyError("x")).reason == "handler"


async def test_an_output_too_large_is_its_records_fault() -> None:
    bench = Bench()
    bench.submit(batch_of([b"0", b"x" * 101, b"2"]))
    await bench.finish(1)
    assert bench.output.sent[0] == b"0"
    assert bench.output.sent[2] == b"2"
    assert b"exceeds 100 bytes" in (bench.output.sent[1] or b"")


async def test_slices_end_where_the_next_record_begins() -> None:
    batch = batch_of([b"0", b"1", b"2", b"3"], first=100, step=10)
    left, right = batch.slice(0, 2), batch.slice(2, 4)
    assert (left.first_offset, left.next_offset, right.first_offset, right.next_offset) == (100, 120, 120, 135)
    assert right.record(1).offset == 130


async def test_the_urgent_topic_goes_first_also_across_partitions() -> None:
    bench = Bench()
    for first in (0, 10):
        for partition in (0, 1):
            bench.submit(batch_of([b"a%d" % first], "a", partition, first))
    bench.submit(batch_of([b"u"], "urgent", 1))
    await bench.finish(5)
    assert bench.output.sent[0] == b"u"
    assert bench.shells[0].calls == [("a", [b"a0"]), ("a", [b"a10"])]


async def test_calls_into_one_partition_never_overlap_and_others_go_on() -> None:
    bench = Bench()
    bench.shells[0].gate = asyncio.Event()
    for first in (0, 10):
        bench.submit(batch_of([b"p0 %d" % first], "a", 0, first))
        bench.submit(batch_of([b"p1 %d" % first], "a", 1, first))
    bench.runner.start()
    async with asyncio.timeout(5):
        while bench.done < 2:
            await asyncio.sleep(0.001)
        assert len(bench.shells[0].calls) == 1
        assert len(bench.shells[1].calls) == 2
        assert not await bench.runner.drain(0.01)
        bench.shells[0].gate.set()
        while bench.done < 4:
            await asyncio.sleep(0.001)
        assert await bench.runner.drain(1.0)
    await bench.runner.stop()


async def test_what_was_dropped_is_not_begun() -> None:
    bench = Bench()
    bench.submit(batch_of([b"0"]))
    bench.ledger.close([("a", 0)])
    bench.submit(batch_of([b"1"], "a", 1))
    await bench.finish(1)
    assert bench.output.sent == [b"1"]

"""What the consumer, the runner and the shells share: limits, the ledger, the processors of the partitions here.

In: assignments and offsets, as the consumer learns them. Out: processors made and closed, positions to read from.
Never: a poll, a commit; those are the consumer's.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import FatalError, SolarisError

from .batch import RecordBatch
from .fetch import Offsets
from .ledger import Ledger, Partition, Ticket
from .output import Output
from .partition import Factory, InputTopic, PartitionStart
from .runner import Runner, Seat

log = logging.getLogger("solaris.transport")


@dataclass(frozen=True)
class TransportConfig:
    """Limits and times of a worker's transport. Times are ms of the process's own clocks."""

    commit_ms: int = 500
    batches_in_flight_max: int = 2  # of one topic-partition: one at work, one waiting
    batch_bytes_max: int = 1_048_576  # of one topic-partition and fetch, as stored (compressed)
    fetch_bytes_max: int = 16_777_216
    fetch_wait_ms: int = 20  # an idle broker answers after this; data is answered at once
    session_ms: int = 10_000
    heartbeat_ms: int = 1_000
    rebalance_ms: int = 60_000
    poll_interval_ms_max: int = 300_000
    request_ms: int = 40_000
    metadata_age_ms_max: int = 60_000
    drain_ms_max: int = 30_000
    delivery_ms_max: int = 20_000
    barrier_ms_max: int = 22_000
    commit_ms_max: int = 10_000
    output_rows_max: int = 100_000
    output_kbytes_max: int = 262_144
    record_bytes_max: int = 1_000_000
    linger_ms: float = 1.0
    retries_max: int = 2
    stop_ms_max: int = 75_000

    def __post_init__(self) -> None:
        if self.delivery_ms_max >= self.barrier_ms_max or self.drain_ms_max + self.barrier_ms_max >= self.rebalance_ms:
            raise ValueError("want delivery_ms_max < barrier_ms_max and drain_ms_max + barrier_ms_max < rebalance_ms")
        if self.stop_ms_max < self.drain_ms_max + self.barrier_ms_max + self.commit_ms_max:
            raise ValueError("want drain_ms_max + barrier_ms_max + commit_ms_max ≤ stop_ms_max")


@dataclass(frozen=True)
class Delivery:
    """What the agent gets for one message: a batch and its place in the ledger."""

    batch: RecordBatch
    ticket: Ticket


class Wiring:
    """One per process. `on_room` is set by the consumer: called when a batch is done."""

    def __init__(
        self,
        topics: tuple[InputTopic, ...],
        make: Factory,
        output: Output,
        config: TransportConfig,
        partitions: int,
    ) -> None:
        self.topics = topics
        self.config = config
        self.output = output
        self.partitions = partitions
        self.failure: BaseException | None = None
        self.stuck = False  # the consumer's thread could not be ended
        self.on_fail: Callable[[], None] = lambda: None
        self.on_room: Callable[[], None] = lambda: None
        self.rows_max = {topic.name: topic.batch_rows_max for topic in topics}
        self.ledger = Ledger()
        self.runner = Runner(
            self.ledger,
            {topic.name: topic.priority for topic in topics},
            lambda: self.on_room(),
            self.fail,
            config.retries_max,
        )
        self._make = make

    def fail(self, error: BaseException) -> None:
        """Stop the process with this error. The first one counts; nothing is committed after it."""
        if self.failure is None:
            self.failure = error
            log.error("stopping: %s", error, exc_info=None if isinstance(error, SolarisError) else error)
            self.on_fail()

    def mark(self, partition: Partition) -> str:
        """The mark of work that would start now."""
        seat = self.runner.seats.get(partition[1])
        return "" if seat is None else seat.processor.mark(partition[0])

    def check_assignment(self, assigned: set[Partition], partition_count: Callable[[str], int]) -> None:
        """FatalError unless every partition here is here with all of its topics, and none has grown."""
        names = {topic.name for topic in self.topics}
        for number in {number for _, number in assigned}:
            here = {topic for topic, other in assigned if other == number}
            if here != names:
                raise FatalError(
                    f"partition {number} was assigned without {sorted(names - here)}: its topics must go together; "
                    "all members of the group must run this version, with the co-partitioned assignor"
                )
        for name in names:
            count = partition_count(name)
            if count != self.partitions:
                raise FatalError(
                    f"topic {name} has {count} partitions and had {self.partitions} when this worker started: keys have moved. "
                    "Stop the producers, set another [kafka] topic_prefix, create its topics and play the log into them"
                )

    def release(self, assigned: set[Partition]) -> None:
        """Close the processors of partitions that are not here any more."""
        here = {number for _, number in assigned}
        self.ledger.revoke([(topic.name, number) for number in self.runner.seats for topic in self.topics])
        for number in [number for number in self.runner.seats if number not in here]:
            log.info("partition %d went away", number)
            self.runner.seats.pop(number).processor.close()

    def place(self, offsets: Mapping[Partition, Offsets]) -> dict[Partition, int]:
        """Make the processors of partitions that came, and ask each where to read its topics from."""
        positions: dict[Partition, int] = {}
        come = {number for _, number in offsets} - self.runner.seats.keys()
        for number in sorted({number for _, number in offsets}):
            of = {topic.name: offsets[(topic.name, number)] for topic in self.topics}
            seat = self.runner.seats.get(number)
            output = self.output.partition() if seat is None else seat.output
            start = PartitionStart(
                number,
                {name: held.committed for name, held in of.items()},
                {name: held.begin for name, held in of.items()},
                {name: held.end for name, held in of.items()},
                output,
                self._finished(number),
            )
            if seat is None:
                seat = self.runner.seats[number] = Seat(self._made(start), output)
            wanted = seat.processor.positions(start)
            for topic in self.topics:
                positions[(topic.name, number)] = _position(topic, number, wanted.get(topic.name), of[topic.name])
        if come:
            gc.collect()
            gc.freeze()  # models, clients and catalogue stay: looking at them again stalls all work for tenths of a second
        return positions

    def close(self) -> None:
        """Close every processor, at the end of the process."""
        self.release(set())

    def _finished(self, number: int) -> Callable[[str], int]:
        return lambda topic: self.ledger.finished((topic, number))

    def _made(self, start: PartitionStart) -> Any:
        try:
            return self._make(start)
        except SolarisError as error:
            raise FatalError(f"partition {start.partition} can't be opened: {error}") from error


def _position(topic: InputTopic, number: int, wanted: int | None, held: Offsets) -> int:
    """Where to read from; a position outside the log is moved to its nearest end, and said loudly."""
    position = wanted
    if position is None and held.committed is not None:
        position = held.committed.offset
    if position is None:
        return held.begin if topic.start == "beginning" else held.end
    if position < held.begin:
        log.error("%s-%d: retention deleted offsets %d to %d unread", topic.name, number, position, held.begin - 1)
        return held.begin
    if position > held.end:
        log.error(
            "%s-%d: position %d lies past the log's end %d: was the topic made anew?",
            topic.name,
            number,
            position,
            held.end,
        )
        return held.end
    return position

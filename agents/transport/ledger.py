"""Which batches are in flight, and how far each partition may be committed.

In: where a partition was assigned to start, the batches read from it in order, when each begins and ends.
Out: per partition the end of the longest finished prefix, with a mark.
Never: a clock, Kafka, a lock; it belongs to one event loop and does nothing but arithmetic.

A ticket covers the offsets [start, end). The end is the consumer's position after the batch, so what compaction,
transaction markers and aborted records leave out between two batches belongs to the one before it, and no gap can stall
a partition. `advance` covers offsets that hold no record at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

Partition = tuple[str, int]
"""(topic, partition); Faust's and aiokafka's named tuples compare equal to it."""


class State(Enum):
    """Where a batch stands. Only WAITING, BEGUN and DONE tickets are in a queue."""

    WAITING = "waiting"
    BEGUN = "begun"
    DONE = "done"
    DROPPED = "dropped"


class Commit(NamedTuple):
    """What the group should hold for a partition: the next offset to answer, and the mark to find that work's outputs by."""

    offset: int
    mark: str


@dataclass(slots=True, eq=False)
class Ticket:
    """One batch in flight: offsets [start, end) of `partition`. `mark` was taken when the batch began."""

    partition: Partition
    start: int
    end: int
    state: State = State.WAITING
    mark: str = ""


@dataclass(slots=True)
class _Lane:
    read: int  # next offset to be read into a ticket
    prefix: int  # everything below it is finished
    committed: int | None
    committed_mark: str
    queue: deque[Ticket] = field(default_factory=deque)
    closing: bool = False


class Ledger:
    """The batches in flight of every assigned partition.

    A partition that was revoked, or is about to be, takes no more batches; those that had not begun are dropped, and what
    was dropped is never committed: its next reader gets it again.
    """

    def __init__(self) -> None:
        self._lanes: dict[Partition, _Lane] = {}

    def assign(self, partition: Partition, position: int, committed: int | None, mark: str = "") -> None:
        """Start `partition` at `position`; `committed` and `mark` are what the group holds. Whatever was in flight is dropped."""
        self.revoke([partition])
        self._lanes[partition] = _Lane(position, position, committed, mark)

    def assigned(self) -> set[Partition]:
        """The partitions that take batches."""
        return {partition for partition, lane in self._lanes.items() if not lane.closing}

    def add(self, partition: Partition, end: int) -> Ticket | None:
        """A batch was read that ends at `end`; None if the partition takes no more."""
        lane = self._lanes.get(partition)
        if lane is None or lane.closing:
            return None
        if end <= lane.read:
            raise ValueError(f"{partition}: a batch ends at {end}, and {lane.read} was read already")
        ticket = Ticket(partition, lane.read, end)
        lane.queue.append(ticket)
        lane.read = end
        return ticket

    def advance(self, partition: Partition, position: int) -> None:
        """The consumer is at `position` without having met a record since the last batch."""
        lane = self._lanes.get(partition)
        if lane is None or lane.closing or position <= lane.read:
            return
        if lane.queue:
            lane.queue[-1].end = position
        else:
            lane.prefix = position
        lane.read = position

    def begin(self, ticket: Ticket, mark: str = "") -> bool:
        """Work on the batch starts now. False if it was dropped: then leave it alone."""
        if ticket.state is not State.WAITING:
            return False
        ticket.state, ticket.mark = State.BEGUN, mark
        return True

    def done(self, ticket: Ticket) -> None:
        """The batch's work is finished, its outputs handed to the producer. Of a dropped batch nothing is remembered."""
        if ticket.state is State.WAITING:
            raise ValueError(f"{ticket.partition}: the batch at {ticket.start} is done before it began")
        if ticket.state is not State.BEGUN:
            return
        ticket.state = State.DONE
        lane = self._lanes[ticket.partition]
        while lane.queue and lane.queue[0].state is State.DONE:
            lane.prefix = lane.queue.popleft().end

    def finished(self, partition: Partition) -> int:
        """Everything below this offset is finished, or holds no record that a consumer is shown; 0 for a partition not here."""
        lane = self._lanes.get(partition)
        return 0 if lane is None else lane.prefix

    def depth(self, partition: Partition) -> int:
        """Batches in flight, begun or waiting."""
        lane = self._lanes.get(partition)
        return 0 if lane is None else len(lane.queue)

    def begun(self) -> list[Ticket]:
        """The batches that are being worked on."""
        return [ticket for lane in self._lanes.values() for ticket in lane.queue if ticket.state is State.BEGUN]

    def close(self, partitions: Iterable[Partition]) -> list[Ticket]:
        """Take no more batches of these; drop and return those that have not begun. What has begun may still end."""
        dropped: list[Ticket] = []
        for partition in partitions:
            lane = self._lanes.get(partition)
            if lane is None:
                continue
            lane.closing = True
            for ticket in lane.queue:
                if ticket.state is State.WAITING:
                    ticket.state = State.DROPPED
                    dropped.append(ticket)
        return dropped

    def revoke(self, partitions: Iterable[Partition]) -> None:
        """Forget these, with whatever is in flight."""
        for partition in list(partitions):
            lane = self._lanes.pop(partition, None)
            for ticket in lane.queue if lane else ():
                if ticket.state is not State.DONE:
                    ticket.state = State.DROPPED

    def committable(self, mark_now: Callable[[Partition], str]) -> dict[Partition, Commit]:
        """What may be committed and is not yet: the end of the longest finished prefix of each partition.

        The mark is the one taken when the first batch after that prefix began, or, if none has, `mark_now(partition)`:
        outputs of the work that is not committed all lie at or after it.
        """
        commits: dict[Partition, Commit] = {}
        for partition, lane in self._lanes.items():
            if lane.committed is not None and lane.prefix <= lane.committed:
                continue
            begun = (ticket for ticket in lane.queue if ticket.state in (State.BEGUN, State.DONE))
            first = next(begun, None)
            commits[partition] = Commit(lane.prefix, mark_now(partition) if first is None else first.mark)
        return commits

    def committed(self, commits: Mapping[Partition, Commit]) -> None:
        """The broker accepted these. A partition that went away meanwhile is none of ours."""
        for partition, commit in commits.items():
            lane = self._lanes.get(partition)
            if lane is not None and (lane.committed is None or commit.offset > lane.committed):
                lane.committed, lane.committed_mark = commit.offset, commit.mark

    def position(self, partition: Partition) -> int:
        """The next offset to be read into a batch."""
        return self._lanes[partition].read

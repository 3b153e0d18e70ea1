"""What a shell implements: one processor per partition, for all of the partition's topics. Nothing here knows Faust.

In: at assignment, what the group and the log hold for each topic; then record batches. Out: nothing but its outputs,
through `PartitionStart.output`. Never: a commit, a seek, a second thread in the same processor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from .batch import Headers, RecordBatch


@dataclass(frozen=True)
class InputTopic:
    """One topic that the workers of a group share out among them.

    `batch_rows_max`: a batch holds at most so many records, so that one batch takes some milliseconds (other partitions and
    topics wait meanwhile). `priority`: of the batches that wait, one of the smallest number goes first.
    `start`: where a group without a committed offset begins, unless the processor says so itself.
    """

    name: str
    batch_rows_max: int = 5_000
    priority: int = 0
    start: Literal["beginning", "end"] = "beginning"


class Committed(Protocol):
    """What the group holds for a topic of the partition."""

    @property
    def offset(self) -> int: ...
    @property
    def mark(self) -> str: ...


class PartitionOutput(Protocol):
    """Where a processor sends. What is sent within one `process` or `on_poison` goes out when that returns, and not at
    all if it raises."""

    def send(self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers = ()) -> None:
        """Send a record to a partition by number. ValueError if it is larger than the broker takes."""

    def reached(self, topic: str, partition: int) -> int | None:
        """The offset after the last record of ours that the broker acknowledged there; None before the first."""


@dataclass(frozen=True)
class PartitionStart:
    """What a processor starts from: for each topic of the partition the group's commit (None = never), and the log's ends.

    The log of topic t holds offsets [begin[t], end[t]). `finished(t)` is asked at any time: below it everything was processed or
    holds nothing to process, such as a transaction's marker, of which no batch ever tells.
    """

    partition: int
    committed: Mapping[str, Committed | None]
    begin: Mapping[str, int]
    end: Mapping[str, int]
    output: PartitionOutput
    finished: Callable[[str], int] = lambda _: 0


class PartitionProcessor(Protocol):
    """The state and the answers of one partition.

    Its calls never overlap. `process` folds, answers and returns; if it raises, it must have changed nothing (one
    write batch at its end): the batch is then halved until the record that raises is alone, tried again, and handed to
    `on_poison`. A FatalError or StateError (disk full, state broken) stops the whole process and nothing more is committed.
    """

    def positions(self, start: PartitionStart) -> Mapping[str, int | None]:
        """Where each topic is to be read from: the stamp, or the smaller of stamp and committed offset where the topic is
        answered, too; None (or no entry) = the committed offset, else `InputTopic.start`. Called at each assignment, also
        when the partition stayed here through a rebalance: the group's offsets may have moved meanwhile."""

    def process(self, batch: RecordBatch) -> Awaitable[None] | None:
        """Fold and answer one batch. May return an awaitable: other partitions go on meanwhile, this one does not."""

    def on_poison(self, batch: RecordBatch, index: int, error: Exception) -> None:
        """Record `index` of `batch` raised `error` each time: send its dead letter."""

    def mark(self, topic: str) -> str:
        """Kept in the group beside the committed offset of `topic`, at most 4,000 characters: where outputs of work that starts
        now could lie, so that a successor can look them up. Taken when a batch begins. "" = nothing to keep."""

    def close(self) -> None:
        """The partition went away, after its last commit. Called once."""


Factory = Callable[[PartitionStart], PartitionProcessor]
"""Makes the processor of a partition when it is assigned. Returns within a second or two: restoring goes on in the background."""

Topics = Sequence[InputTopic]

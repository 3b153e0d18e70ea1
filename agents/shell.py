"""What the shells of speculate and serve share: decoding a batch, dead letters, records that came to the wrong partition.

In: record batches. Out: the good records, dead letters for the bad ones (each topic has one owner that writes them), and detours: a
record on a partition that its key does not hash to is sent once more, by its owner, to the right one, with its origin.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agents.catalogue import Catalogue
from agents.kafka import KafkaConfig, TopicAdmin
from agents.stats import StatsFile
from agents.transport.batch import Headers, RecordBatch
from agents.transport.partition import PartitionOutput, PartitionStart
from schemas.deadletters import dead_letter
from schemas.errors import BadRecord
from schemas.events import check_key
from schemas.keys import partition_of
from schemas.topics import DEAD_LETTERS, TopicSpec
from streams.items import ItemIndex
from streams.state.manifest import StateManifest, TopicState
from streams.state.rocks import RocksStore, StateConfig, open_store

T = TypeVar("T")


class _OfUser(Protocol):
    @property
    def user(self) -> str: ...


U = TypeVar("U", bound=_OfUser)

ORIGIN = "solaris-origin"
"""Header of a record that took the detour: `partition:offset` where it first lay."""


GAUGES = frozenset(
    ("answers", "answers_bytes", "neighbor_users", "clock_ms", "price", "budget", "asked", "items", "similar_items", "ledger",
     "embeddings_offset")
)  # fmt: skip
"""Of a processor's counts those that say how things are, not how often something happened: they go with their partition."""


def add_counts(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add numbers by name, in groups of groups; whatever is no number is left out."""
    for name, value in more.items():
        if isinstance(value, dict):
            add_counts(total.setdefault(name, {}), value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            total[name] = total.get(name, 0) + value


@dataclass
class WorkerContext:
    """What all partitions of one process share."""

    kafka: KafkaConfig
    partitions: int
    state_dir: Path
    state: StateConfig
    topics: dict[str, TopicState]
    items: ItemIndex
    catalogue: Catalogue
    stats: StatsFile | None = None
    processors: dict[int, Any] = field(default_factory=dict)
    past: dict[str, Any] = field(default_factory=dict)
    """Counts of the partitions that went away again."""

    def open(self, partition: int, space: int) -> RocksStore:
        """The partition's state directory."""
        manifest = StateManifest(partition, space, self.topics)
        return open_store(self.state_dir / str(partition), manifest, self.state, time.sleep)

    def placed(self, partition: int, processor: Any) -> None:
        """A partition came; the stats begin with the first."""
        self.processors[partition] = processor
        if self.stats is not None:
            try:
                self.stats.start(asyncio.get_running_loop())
            except RuntimeError:  # no loop: a processor that is driven by hand has nobody to write for
                return

    def gone(self, partition: int) -> None:
        """A partition went; what it counted stays."""
        processor = self.processors.pop(partition, None)
        if processor is not None:
            counts = {name: value for name, value in processor.counts().items() if name not in GAUGES}
            add_counts(self.past, counts)


class Records:
    """One partition's reading of one process: `counts` by what became of records."""

    def __init__(self, kafka: KafkaConfig, start: PartitionStart, partitions: int) -> None:
        self._kafka, self._output = kafka, start.output
        self._partition, self._partitions = start.partition, partitions
        self.counts: Counter[str] = Counter()

    def decode(
        self, batch: RecordBatch, spec: TopicSpec, decode: Callable[[int], T], *, owner: bool
    ) -> list[tuple[int, T]]:
        """(index, decoded) of the good records; the bad ones become dead letters if this process owns the topic."""
        good: list[tuple[int, T]] = []
        for index in range(len(batch)):
            try:
                good.append((index, decode(index)))
            except BadRecord as error:
                self.refuse(batch, index, spec, error, owner=owner)
        return good

    def refuse(self, batch: RecordBatch, index: int, spec: TopicSpec, error: BadRecord, *, owner: bool) -> None:
        """Count a bad record; write its dead letter where we own the topic."""
        self.counts[f"refused_{spec.name}_{error.reason}"] += 1
        if owner:
            letter(self._kafka, self._output, batch, index, error)
            self.counts["dead_letters"] += 1

    def strays(self, batch: RecordBatch, users: Mapping[int, str], spec: TopicSpec, resend: Container[int]) -> set[int]:
        """Indices of records that belong on another partition (and took no detour yet): skipped by all who read them, and sent
        there by the topic's owner, who names in `resend` those that it has not sent on before."""
        found: set[int] = set()
        for index, user in users.items():
            right = partition_of(user, self._partitions)
            if right == self._partition or origin(batch.headers[index]) is not None:
                continue
            found.add(index)
            self.counts[f"strayed_{spec.name}"] += 1
            if index in resend:
                at = f"{batch.partition}:{int(batch.offsets[index])}".encode()
                self._output.send(
                    self._kafka.topic(spec), right, batch.keys[index], batch.values[index], ((ORIGIN, at),)
                )
        return found


def keyed(key: bytes | None, record: U) -> U:
    """A decoded inner record whose key is its user, as on the edges: raises `BadRecord` (`key`) for another, whose rows would lie
    in a partition that is not the user's."""
    check_key(key, record.user)
    return record


def origin(headers: Headers) -> tuple[int, int] | None:
    """(partition, offset) where a record first lay, None if it took no detour."""
    for name, value in headers:
        if name == ORIGIN and value is not None:
            partition, _, offset = value.decode("ascii", "replace").partition(":")
            if partition.isdigit() and offset.isdigit():
                return int(partition), int(offset)
    return None


def letter(kafka: KafkaConfig, output: PartitionOutput, batch: RecordBatch, index: int, error: BadRecord) -> None:
    """Write one dead letter, to the partition of its record by number."""
    record = batch.record(index)
    key, value = dead_letter(
        record.topic, record.partition, record.offset, record.append_ts_ms, record.key, record.value, error
    )
    output.send(kafka.topic(DEAD_LETTERS), record.partition, key, value)


def handler_error(error: Exception) -> BadRecord:
    """The reason for a record whose processing failed each time: its own, where the operator found the fault in it."""
    if isinstance(error, BadRecord):
        return error
    return BadRecord("handler", f"{type(error).__name__}: {error}")


def topic_states(kafka: KafkaConfig, specs: Iterable[TopicSpec]) -> dict[str, TopicState]:
    """Topic id and partition count of the topics that state rests on, by their names without the prefix."""
    return {name: TopicState(number, count) for name, (number, count) in TopicAdmin(kafka).ids(specs).items()}

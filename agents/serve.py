"""Serve on Kafka: one partition's events, embeddings and ranking requests into its state and its ranked results.

In: record batches of three topics. Out: one result a request, dead letters of requests and embeddings. Never: waits for the FM, or
judges a request by anything but what is folded; until what was there at the assignment is folded, results say `degraded`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from agents.kafka import KafkaConfig
from agents.readback import read_back
from agents.shell import Records, WorkerContext, handler_error, keyed, letter, origin
from agents.since import since
from agents.transport.batch import RecordBatch
from agents.transport.partition import InputTopic, PartitionStart
from models.bundle import Bundle
from schemas.errors import BadRecord, ConfigError, FatalError
from schemas.events import EventBatch, decode_events
from schemas.inference import Embeddings, decode_embeddings
from schemas.ranking import CheckedRequest, decode_request, decode_result
from schemas.topics import EMBEDDINGS, EVENTS, RANKED_RESULTS, RANKING_REQUESTS, TopicSpec
from streams.cache import RETENTION_MS_MIN
from streams.neighbors import Cut, Generation
from streams.serve import Serve, ServeConfig
from streams.state.store import Store

log = logging.getLogger("solaris.serve")

T = TypeVar("T")

ROLE = "serve"
TOPICS = (EVENTS, EMBEDDINGS, RANKING_REQUESTS)

_builders = ThreadPoolExecutor(1, thread_name_prefix="neighbors")


def input_topics(kafka: KafkaConfig) -> tuple[InputTopic, ...]:
    """Requests go first; folds come in batches of a few milliseconds, so that a request never waits long behind one."""
    return (
        InputTopic(kafka.topic(EVENTS), batch_rows_max=500, priority=1),
        InputTopic(kafka.topic(EMBEDDINGS), batch_rows_max=200, priority=1),
        InputTopic(kafka.topic(RANKING_REQUESTS), batch_rows_max=100, priority=0),
    )


class ServeProcessor:
    """One partition of serve; see `agents.transport.partition.PartitionProcessor`."""

    def __init__(self, context: WorkerContext, bundle: Bundle, config: ServeConfig, start: PartitionStart) -> None:
        self._context, self._kafka, self._output = context, context.kafka, start.output
        self._partition = start.partition
        self._results = context.kafka.topic(RANKED_RESULTS)
        self.records = Records(context.kafka, start, context.partitions)
        store = context.open(start.partition, bundle.space)
        base = bundle.base if bundle.has("base") else None
        if config.shadow and base is None:
            raise ConfigError("[serve] shadow = true, but the bundle has no base ranker; train it with `solaris train`")
        self.core = Serve(
            start.partition, bundle.hash, bundle.ranker, base, bundle.space, bundle.d, config, store, context.items
        )
        self._store, self._finished = store, start.finished
        self._due = {EVENTS.name: start.end[context.kafka.topic(EVENTS)]}
        self._due[EMBEDDINGS.name] = start.end[context.kafka.topic(EMBEDDINGS)]
        self._cut: Cut | None = None
        self._building: Future[Generation] | None = None
        self._reading: Future[list[bytes]] | None = None
        self._older: queue.SimpleQueue[Future[list[bytes]]] = queue.SimpleQueue()
        self._results_from = self._results_before = self._again_below = self._next_request = 0
        self._handlers: dict[str, Callable[[RecordBatch], None]] = {
            context.kafka.topic(EVENTS): self._events,
            context.kafka.topic(EMBEDDINGS): self._embeddings,
            context.kafka.topic(RANKING_REQUESTS): self._requests,
        }
        context.placed(start.partition, self)

    def positions(self, start: PartitionStart) -> Mapping[str, int | None]:
        """Folds begin at their stamp; without one, embeddings where a vector can still count, events at the log's start (histories
        have no window). Requests begin at the committed offset.

        At each assignment, also where the partition stayed: another may have answered for it meanwhile, and what is not committed
        comes again.
        """
        wanted: dict[str, int | None] = {}
        for spec in (EVENTS, EMBEDDINGS):
            name = self._kafka.topic(spec)
            stamp = self._store.stamp(spec.name)
            wanted[name] = self._first(start, spec) if stamp is None else stamp
            if stamp is not None and stamp > start.end[name]:
                raise FatalError(
                    f"{name}-{self._partition}: the state has folded offset {stamp - 1}, but the log ends at {start.end[name]}: "
                    f"it was cut. Move {self._context.state_dir / str(self._partition)} away and start again: it is folded anew"
                )
            nothing_left = max(wanted[name] or 0, start.begin[name]) >= start.end[name]
            self._due[spec.name] = 0 if nothing_left else start.end[name]
        self._results_from = self._read_results(start)
        return wanted

    def _first(self, start: PartitionStart, spec: TopicSpec) -> int:
        """Where a fold without a stamp begins."""
        name, config = self._kafka.topic(spec), self.core.config
        if spec is not EMBEDDINGS:
            return start.begin[name]
        window_ms = max(config.ttl_ms, config.window_ms, RETENTION_MS_MIN)
        ends = start.begin[name], start.end[name]
        return since(self._kafka, name, self._partition, ends, window_ms, lambda value: decode_embeddings(value).as_of)

    def process(self, batch: RecordBatch) -> None:
        """Fold or answer one batch."""
        self._take_up()
        self._handlers[batch.topic](batch)

    def on_poison(self, batch: RecordBatch, index: int, error: Exception) -> None:
        """A record whose handling raised each time becomes a dead letter, unless another process owns its topic."""
        if batch.topic != self._kafka.topic(EVENTS):
            letter(self._kafka, self._output, batch, index, handler_error(error))
        self.records.counts["poisoned"] += 1

    def mark(self, topic: str) -> str:
        """Beside the offset of requests: where in ranked-results the answers of work that starts now could begin.

        Of requests that come again after a crash the answers begin where they did for our predecessor.
        """
        if topic != self._kafka.topic(RANKING_REQUESTS):
            return ""
        if self._next_request < self._again_below:
            return str(self._results_before)
        return str(max(self._output.reached(self._results, self._partition) or 0, self._results_from))

    def close(self) -> None:
        """Give the state directory back."""
        self._context.gone(self._partition)
        self._store.close()

    @property
    def ready(self) -> bool:
        """Whether it answers as after any length of time: everything folded, the answers of the last ten minutes read back."""
        return not self.degraded and (self._reading is None or self._reading.done())

    @property
    def store(self) -> Store:
        """The partition's state."""
        return self._store

    @property
    def degraded(self) -> bool:
        """Whether something that was in the log at the assignment is not folded yet.

        The stamp alone can't say it: behind the last record there may be a transaction's marker, or what was aborted.
        """
        return any(
            max(self._store.stamp(spec.name) or 0, self._finished(self._kafka.topic(spec))) < self._due[spec.name]
            for spec in (EVENTS, EMBEDDINGS)
        )

    def counts(self) -> dict[str, Any]:
        """What happened here so far."""
        return {**self.core.stats(), **self.records.counts}

    def _events(self, batch: RecordBatch) -> None:
        events, refused = decode_events(
            batch.partition, batch.offsets.tolist(), batch.keys, batch.values, batch.append_ts_ms.tolist()
        )
        for index, error in refused:
            self.records.refuse(batch, index, EVENTS, error, owner=False)
        mine, origins = own_events(self.records, batch, events, self._store.stamps(), resend=())
        self.core.events(mine, batch.next_offset, origins)

    def _embeddings(self, batch: RecordBatch) -> None:
        def decode(index: int) -> Embeddings:
            return keyed(batch.keys[index], decode_embeddings(batch.values[index]))

        stamp = self._store.stamp(EMBEDDINGS.name) or 0
        good = self.records.decode(batch, EMBEDDINGS, decode, owner=True)
        fresh = [vectors for index, vectors in good if batch.offsets[index] >= stamp]
        self.core.embeddings(fresh, batch.next_offset)
        if self._cut is None and self._building is None and self.core.cut_due():
            self._cut = self.core.cut()

    def _requests(self, batch: RecordBatch) -> None:
        def decode(index: int) -> CheckedRequest:
            return decode_request(
                batch.keys[index], batch.values[index], int(batch.append_ts_ms[index]), int(batch.offsets[index])
            )

        self._next_request = batch.next_offset
        good = self.records.decode(batch, RANKING_REQUESTS, decode, owner=True)
        users = {index: request.user for index, request in good}
        strays = self.records.strays(batch, users, RANKING_REQUESTS, resend=range(len(batch)))
        requests = [request for index, request in good if index not in strays]
        wall_ms = time.time() * 1000
        late = [r.deadline_ms is not None and wall_ms > r.append_ms + r.deadline_ms for r in requests]
        for request, data in zip(requests, self.core.answer(requests, late, self.degraded), strict=True):
            self._output.send(self._results, self._partition, request.user.encode(), data)

    def _take_up(self) -> None:
        """Between batches: older answers that were read back, and the next generation of neighbours."""
        self.core.items_applied = self._context.catalogue.offset
        while not self._older.empty():
            self.core.remember(
                _results(_outcome(self._older.get(), "the answers before the last commit can't be read back"))
            )
        if self._building is not None and self._building.done():
            self.core.install(_outcome(self._building, "no generation of neighbours can be built"))
            self._building = None
        if self._cut is not None and not self.core.step(self._cut):
            self._building, self._cut = _builders.submit(self._cut.finish), None

    def _read_results(self, start: PartitionStart) -> int:
        """Answers that a predecessor may have sent after its last commit, at once; the last ten minutes in the background."""
        requests = self._kafka.topic(RANKING_REQUESTS)
        committed = start.committed[requests]
        mark = int(committed.mark) if committed is not None and committed.mark.isdigit() else None
        found, end = read_back(self._kafka, self._results, self._partition, mark, self.core.config.answers_window_ms)
        recent = _results(found.recent)
        self.core.remember(recent)
        self.core.expect(recent, start.end[requests])
        if committed is not None and found.recent:
            self._next_request, self._again_below = committed.offset, start.end[requests]
            self._results_before = mark or 0
        self._reading = found.older
        if found.older is not None:
            found.older.add_done_callback(self._older.put)
        return end


def _outcome(done: Future[T], otherwise: str) -> T:
    """What a thread beside us made. Its failure is no record's, so it stops the process: FatalError, beginning with `otherwise`."""
    error = done.exception()
    if error is not None:
        raise FatalError(f"{otherwise}: {error}; start again") from error
    return done.result()


def _results(values: list[bytes]) -> list[bytes]:
    """Those that are results; what else somebody wrote to the topic gets its dead letter from speculate."""
    good = []
    for value in values:
        try:
            decode_result(value)
        except BadRecord:
            continue
        good.append(value)
    return good


def own_events(
    records: Records, batch: RecordBatch, events: EventBatch, stamps: Mapping[str, int], resend: Container[int]
) -> tuple[EventBatch, dict[str, int]]:
    """The events that belong here and are new, and the stamps of those that took the detour.

    Dropped: events of users of another partition (those at the indices `resend` are sent on), and detoured ones that were folded
    before.
    """
    index_of = {int(offset): index for index, offset in enumerate(batch.offsets.tolist())}
    indices = [index_of[offset] for offset in events.offsets.tolist()]
    users = dict(zip(indices, events.users, strict=True))
    strays = records.strays(batch, users, EVENTS, resend)
    origins: dict[str, int] = {}
    keep = []
    stamp = stamps.get(EVENTS.name, 0)
    for place, index in enumerate(indices):
        first = origin(batch.headers[index])
        if first is not None:
            name = f"{EVENTS.name}@{first[0]}"
            folded = batch.offsets[index] >= stamp and first[1] < max(stamps.get(name, 0), origins.get(name, 0))
            if folded:
                records.counts["detours_repeated"] += 1
                continue
            origins[name] = max(origins.get(name, stamps.get(name, 0)), first[1] + 1)
        if index not in strays:
            keep.append(place)
    return (events if len(keep) == len(events) else events.take(keep)), origins

"""Speculate on Kafka: one partition's events, ranked results and heads of embeddings into FM requests.

In: record batches of three topics. Out: FM requests to the same partition, dead letters and detours of events. Never: reads a
vector, or answers twice for an event below the group's commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agents.kafka import KafkaConfig
from agents.serve import own_events
from agents.shell import Records, WorkerContext, handler_error, keyed, letter
from agents.since import since
from agents.transport.batch import RecordBatch
from agents.transport.partition import InputTopic, PartitionStart
from models.bundle import Bundle
from schemas.events import check_key, decode_events
from schemas.inference import Embeddings, FmRequest, decode_embeddings, encode_fm_request
from schemas.ranking import RankedResult, decode_result
from schemas.topics import EMBEDDINGS, EVENTS, FM_REQUESTS, RANKED_RESULTS
from streams.speculate import Speculate, SpeculateConfig
from streams.state.store import Store

ROLE = "speculate"
TOPICS = (EVENTS, RANKED_RESULTS, EMBEDDINGS)


def input_topics(kafka: KafkaConfig) -> tuple[InputTopic, ...]:
    """Without a commit it speculates from the log's end on; it still folds events from their stamp."""
    return (
        InputTopic(kafka.topic(EVENTS), batch_rows_max=1_000, start="end"),
        InputTopic(kafka.topic(RANKED_RESULTS), batch_rows_max=200, start="end"),
        InputTopic(kafka.topic(EMBEDDINGS), batch_rows_max=500),
    )


class SpeculateProcessor:
    """One partition of speculate; see `agents.transport.partition.PartitionProcessor`."""

    def __init__(self, context: WorkerContext, bundle: Bundle, config: SpeculateConfig, start: PartitionStart) -> None:
        self._context, self._kafka, self._output = context, context.kafka, start.output
        self._partition = start.partition
        self._fm_requests = context.kafka.topic(FM_REQUESTS)
        self.records = Records(context.kafka, start, context.partitions)
        self._store = context.open(start.partition, bundle.space)
        priors = bundle.priors if bundle.has("priors") else None
        self.core = Speculate(
            start.partition, bundle.ranker, priors, bundle.space, config, self._store, context.items, context.partitions
        )
        self._answer_from = dict.fromkeys((context.kafka.topic(EVENTS), context.kafka.topic(RANKED_RESULTS)), 0)
        self._handlers: dict[str, Callable[[RecordBatch], None]] = {
            context.kafka.topic(EVENTS): self._events,
            context.kafka.topic(RANKED_RESULTS): self._results,
            context.kafka.topic(EMBEDDINGS): self._heads,
        }
        context.placed(start.partition, self)

    def positions(self, start: PartitionStart) -> Mapping[str, int | None]:
        """Events and results from the smaller of stamp and commit, heads from their stamp. Without one: events from the log's start
        (histories have no window), results from the commit (their past is no more than soft), heads from a TTL ago."""
        events, results, heads = (self._kafka.topic(spec) for spec in TOPICS)
        self._answer_from = {name: _answered(start, name) for name in (events, results)}
        stamps = [self._store.stamp(spec.name) for spec in TOPICS]
        folded = start.begin[events] if stamps[0] is None else stamps[0]
        counted = self._answer_from[results] if stamps[1] is None else stamps[1]
        return {
            events: min(folded, self._answer_from[events]),
            results: min(counted, self._answer_from[results]),
            heads: self._live_heads(start, heads) if stamps[2] is None else stamps[2],
        }

    def _live_heads(self, start: PartitionStart, topic: str) -> int:
        """Where heads begin that may still be fresh."""
        ends, ttl_ms = (start.begin[topic], start.end[topic]), self.core.config.ttl_ms
        return since(self._kafka, topic, self._partition, ends, ttl_ms, lambda value: decode_embeddings(value).as_of)

    def process(self, batch: RecordBatch) -> None:
        """Fold or answer one batch."""
        self._handlers[batch.topic](batch)

    def on_poison(self, batch: RecordBatch, index: int, error: Exception) -> None:
        """A record whose handling raised each time becomes a dead letter, unless serve owns its topic."""
        if batch.topic != self._kafka.topic(EMBEDDINGS):
            letter(self._kafka, self._output, batch, index, handler_error(error))
        self.records.counts["poisoned"] += 1

    def mark(self, topic: str) -> str:
        """Beside the offset of events and results: from where on they are answered. What lies before it is folded alone, also by a
        successor. A repeated FM request costs a duplicate, which `as_of` tells apart.
        """
        return str(self._answer_from[topic]) if topic in self._answer_from else ""

    def close(self) -> None:
        """Give the state directory back."""
        self._context.gone(self._partition)
        self._store.close()

    @property
    def store(self) -> Store:
        """The partition's state."""
        return self._store

    @property
    def ready(self) -> bool:
        """Speculation works from its first event on."""
        return True

    def counts(self) -> dict[str, Any]:
        """What happened here so far."""
        return {**self.core.stats(), **self.records.counts}

    def _events(self, batch: RecordBatch) -> None:
        events, refused = decode_events(
            batch.partition, batch.offsets.tolist(), batch.keys, batch.values, batch.append_ts_ms.tolist()
        )
        answer_from = self._answer_from[batch.topic]
        answered = {index for index in range(len(batch)) if batch.offsets[index] >= answer_from}
        for index, error in refused:
            self.records.refuse(batch, index, EVENTS, error, owner=index in answered)
        mine, origins = own_events(self.records, batch, events, self._store.stamps(), resend=answered)
        self._send(self.core.events(mine, batch.next_offset, answer_from, origins))

    def _results(self, batch: RecordBatch) -> None:
        def decode(index: int) -> RankedResult:
            result = decode_result(batch.values[index])
            check_key(batch.keys[index], result.user_id)
            return result

        good = self.records.decode(batch, RANKED_RESULTS, decode, owner=True)
        stamp = self._store.stamp(RANKED_RESULTS.name) or 0
        new, answered = (
            sum(bool(batch.offsets[index] >= first) for index, _ in good)
            for first in (stamp, self._answer_from[batch.topic])
        )
        self._send(self.core.results([result for _, result in good], batch.next_offset, new, answered))

    def _heads(self, batch: RecordBatch) -> None:
        def decode(index: int) -> Embeddings:
            return keyed(batch.keys[index], decode_embeddings(batch.values[index]))

        good = self.records.decode(batch, EMBEDDINGS, decode, owner=False)
        self.core.heads([vectors for _, vectors in good], batch.next_offset)

    def _send(self, requests: Iterable[FmRequest]) -> None:
        for request in requests:
            self._output.send(self._fm_requests, self._partition, request.user.encode(), encode_fm_request(request))


def _answered(start: PartitionStart, topic: str) -> int:
    """From where on the group's work on a topic is to be answered: its commit, or the log's end where there is none yet."""
    committed = start.committed[topic]
    if committed is None:
        return start.end[topic]
    return max(committed.offset, int(committed.mark) if committed.mark.isdigit() else 0)

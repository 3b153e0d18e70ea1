"""Speculate on Kafka: one partition's events, ranked results and heads of embeddings into FM requests.

In: record batches of three topics. Out: FM requests to the same partition, dead letters and detours of events. Never: reads a
vector, or answers twice for an event below the group's commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agents.kafka import KafkaConfig
from agents.serve import own_events
from agents.shell import Records, WorkerContext, handler_error, letter
from agents.transport.batch import RecordBatch
from agents.transport.partition import InputTopic, PartitionStart
from models.bundle import Bundle
from schemas.events import decode_events
from schemas.inference import FmRequest, decode_embeddings, encode_fm_request
from schemas.ranking import decode_result
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
        self._answer_from = 0
        self._handlers: dict[str, Callable[[RecordBatch], None]] = {
            context.kafka.topic(EVENTS): self._events,
            context.kafka.topic(RANKED_RESULTS): self._results,
            context.kafka.topic(EMBEDDINGS): self._heads,
        }
        context.placed(start.partition, self)

    def positions(self, start: PartitionStart) -> Mapping[str, int | None]:
        """Events from the smaller of stamp and commit; the rest from the commit. A new store reads all embeddings there are."""
        events, embeddings = self._kafka.topic(EVENTS), self._kafka.topic(EMBEDDINGS)
        committed = start.committed[events]
        if committed is None:
            self._answer_from = start.end[events]
        else:
            self._answer_from = max(committed.offset, int(committed.mark) if committed.mark.isdigit() else 0)
        stamp = self._store.stamp(EVENTS.name)
        folded = start.begin[events] if stamp is None else stamp
        return {
            events: min(folded, self._answer_from),
            embeddings: start.begin[embeddings] if stamp is None else None,
        }

    def process(self, batch: RecordBatch) -> None:
        """Fold or answer one batch."""
        self._handlers[batch.topic](batch)

    def on_poison(self, batch: RecordBatch, index: int, error: Exception) -> None:
        """A record whose handling raised each time becomes a dead letter, unless serve owns its topic."""
        if batch.topic != self._kafka.topic(EMBEDDINGS):
            letter(self._kafka, self._output, batch, index, handler_error(error))
        self.records.counts["poisoned"] += 1

    def mark(self, topic: str) -> str:
        """Beside the offset of events: from where on they are answered. What lies before it is folded alone, also by a successor.

        Nothing for the rest: a repeated FM request costs a duplicate, which `as_of` tells apart.
        """
        return str(self._answer_from) if topic == self._kafka.topic(EVENTS) else ""

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
        answered = {index for index in range(len(batch)) if batch.offsets[index] >= self._answer_from}
        for index, error in refused:
            self.records.refuse(batch, index, EVENTS, error, owner=index in answered)
        mine, origins = own_events(self.records, batch, events, self._store.stamps(), resend=answered)
        self._send(self.core.events(mine, batch.next_offset, self._answer_from, origins))

    def _results(self, batch: RecordBatch) -> None:
        good = self.records.decode(batch, RANKED_RESULTS, lambda index: decode_result(batch.values[index]), owner=True)
        self._send(self.core.results([result for _, result in good], batch.next_offset))

    def _heads(self, batch: RecordBatch) -> None:
        good = self.records.decode(batch, EMBEDDINGS, lambda index: decode_embeddings(batch.values[index]), owner=False)
        self.core.heads([vectors for _, vectors in good], batch.next_offset)

    def _send(self, requests: Iterable[FmRequest]) -> None:
        for request in requests:
            self._output.send(self._fm_requests, self._partition, request.user.encode(), encode_fm_request(request))

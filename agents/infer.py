"""Infer on Kafka: FM requests into embeddings, batched for the accelerator. Stateless: more processes are more throughput.

In: `fm-requests`, shared out by the consumer group. Out: embeddings to the request's partition by number, dead
letters. Never: runs the FM for a request past its deadline, or commits an offset before the answers up to it are
acknowledged.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any

import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from agents.catalogue import Catalogue
from agents.groups import group_id
from agents.kafka import KafkaConfig, librdkafka_settings, passes
from agents.results import arrived
from agents.send import Sender
from agents.shell import keyed
from agents.stats import StatsFile
from agents.transport.wiring import TransportConfig
from schemas.deadletters import dead_letter
from schemas.errors import BadRecord, FatalError
from schemas.inference import FmRequest, decode_fm_request, encode_embeddings, encode_fm_request
from schemas.topics import DEAD_LETTERS, EMBEDDINGS, FM_REQUESTS
from streams.dispatch import Dispatcher, InferConfig, Offered
from streams.infer import Infer

log = logging.getLogger("solaris.infer")

ROLE = "infer"
COMMIT_S = 0.05
IDLE_S = 0.1
ROWS = 500
FLUSH_S_MAX = 20.0
GONE = frozenset(
    (KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError._STATE,
     KafkaError._ASSIGNMENT_LOST, KafkaError._NO_OFFSET)
)  # fmt: skip
"""A commit is refused so while the group shares its partitions out anew: `_on_revoke` and `_on_lost` say which of ours went."""

POLL_MS_MAX = 300_000
"""Longest pause between two polls: a batch of the FM must take less."""


_NONE = np.zeros(0, np.float32)
_NOTHING = FmRequest(
    "", 0, 0, POLL_MS_MAX, 0, 0, [], _NONE, _NONE, _NONE.astype(np.uint8), [], _NONE.astype(np.uint8), _NONE.astype(np.int64)
)  # fmt: skip
"""Stands for a record that became a dead letter: it asks for nothing, so it is finished at once, and the commit can pass it."""


class InferWorker:
    """One process. `run` returns at SIGTERM or SIGINT with everything that was handed out answered and committed."""

    def __init__(
        self,
        kafka: KafkaConfig,
        config: InferConfig,
        transport: TransportConfig,
        infer: Infer,
        catalogue: Catalogue,
        stats: StatsFile,
    ) -> None:
        """Of `transport` the session's times alone: a dead process's partitions are another's after `session_ms`."""
        self._kafka, self._infer, self._catalogue, self._stats = kafka, infer, catalogue, stats
        self._dispatcher = Dispatcher(config)
        self._counts: Counter[str] = Counter()
        self._answered: list[Offered] = []
        self._finished: dict[int, int] = {}  # partition → next offset, of what no commit has covered yet
        self._assigned = False
        self._stop = threading.Event()
        self._sender = Sender(
            kafka, {"enable.idempotence": True, "linger.ms": 1, "delivery.timeout.ms": int(FLUSH_S_MAX * 1000)}
        )
        self._consumer = Consumer(
            librdkafka_settings(kafka)
            | {
                "group.id": group_id(kafka, ROLE),
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": transport.session_ms,
                "heartbeat.interval.ms": transport.heartbeat_ms,
                "max.poll.interval.ms": POLL_MS_MAX,
                "fetch.wait.max.ms": 20,
            }
        )

    def counts(self) -> tuple[bool, dict[str, Any]]:
        """Ready, and what happened so far."""
        dropped = {f"infer_{reason}": pairs for reason, pairs in self._dispatcher.dropped_pairs.items() if pairs}
        facts = {"dropped": dropped, "queued_pairs": self._dispatcher.queued_pairs, "failed": self._infer.failed}
        return self._assigned, {**self._counts, **facts}

    def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises `FatalError` for what is not a record's fault."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._consumer.subscribe(
            [self._kafka.topic(FM_REQUESTS)],
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )
        committed = written = time.monotonic()
        try:
            while not self._stop.is_set():
                self._take(arrived(self._consumer, ROWS, self._wait_s()))
                self._work(drain=False)
                now = time.monotonic()
                if now - committed >= COMMIT_S:
                    self._commit()
                    self._catalogue.poll(0)
                    committed = now
                if now - written >= 0.5:
                    self._stats.write()
                    written = now
            self._work(drain=True)
            self._commit()
        finally:
            self._consumer.close()
            self._stats.write()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop.set()

    def _on_assign(self, _consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        self._assigned = self._assigned or bool(partitions)
        log.info("assigned %s", [at.partition for at in partitions])

    def _on_revoke(self, _consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Finish what was handed out, commit it, and leave the rest to the next owner."""
        self._commit()
        self._forget([at.partition for at in partitions])

    def _on_lost(self, _consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """They are another's already: nothing may be committed for them."""
        gone = {at.partition for at in partitions}
        self._answered = [offered for offered in self._answered if offered.partition not in gone]
        self._forget(gone)

    def _forget(self, partitions: Collection[int]) -> None:
        self._dispatcher.revoke(partitions)
        for partition in partitions:
            self._finished.pop(partition, None)

    def _wait_s(self) -> float:
        wait = self._dispatcher.wait_ms(_wall_ms())
        return IDLE_S if wait is None else min(IDLE_S, wait / 1000)

    def _take(self, messages: Sequence[Message]) -> None:
        offered: list[Offered] = []
        for message in messages:
            error = message.error()
            if error is not None:
                if not passes(error):
                    raise FatalError(f"reading {self._kafka.topic(FM_REQUESTS)} failed: {error.str()}")
                continue
            partition, offset, append_ms = message.partition() or 0, message.offset() or 0, message.timestamp()[1]
            try:
                request = keyed(_bytes(message.key()), decode_fm_request(_bytes(message.value())))
            except BadRecord as bad:
                self._refuse(message, bad)
                request = _NOTHING
            self._counts["requests"] += 1
            offered.append(Offered(partition, offset, append_ms, request))
        if offered:
            self._dispatcher.offer(offered, _wall_ms())

    def _work(self, *, drain: bool) -> None:
        while batch := self._dispatcher.next_batch(_wall_ms(), drain):
            answers = self._infer.run([one.request for one in batch], [one.offset for one in batch])
            for offered, answer in zip(batch, answers, strict=True):
                if isinstance(answer, BadRecord):
                    self._dead_letter(offered, answer)
                else:
                    self._counts["pairs_computed"] += len(answer.items)
                    self._send(self._kafka.topic(EMBEDDINGS), offered.partition, answer.user, encode_embeddings(answer))
            self._answered += batch
            self._counts["batches"] += 1

    def _send(self, topic: str, partition: int, key: str, value: bytes) -> None:
        self._sender.send(topic, key.encode(), value, partition)

    def _commit(self) -> None:
        """Answers acknowledged, then offsets: never the other way round."""
        answered, self._answered = self._answered, []
        if self._sender.flush(FLUSH_S_MAX):
            raise FatalError(
                f"embeddings or dead letters were not acknowledged within {FLUSH_S_MAX:g} s; look at the broker, then start again"
            )
        if self._sender.failed:
            raise FatalError(
                f"embeddings or dead letters were not acknowledged: {dict(self._sender.failed)}; nothing after the last commit "
                "counts"
            )
        self._dispatcher.done(answered)
        topic = self._kafka.topic(FM_REQUESTS)
        self._finished |= self._dispatcher.finished()
        if not self._finished:
            return
        offsets = [TopicPartition(topic, partition, at) for partition, at in self._finished.items()]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            refusal: KafkaError = error.args[0]
            if not (passes(refusal) or refusal.code() in GONE):
                raise FatalError(f"group {group_id(self._kafka, ROLE)} can't commit: {refusal.str()}") from error
            # Tried again with the next: else a quiet topic would seem to lag for ever.
            log.warning("a commit was refused (%s); of partitions that went it is computed again", refusal.str())
            return
        self._finished.clear()

    def _refuse(self, message: Message, error: BadRecord) -> None:
        self._counts[f"refused_{error.reason}"] += 1
        key, value = dead_letter(
            self._kafka.topic(FM_REQUESTS), message.partition() or 0, message.offset() or 0, message.timestamp()[1],
            _bytes(message.key()), _bytes(message.value()), error,
        )  # fmt: skip
        self._send(self._kafka.topic(DEAD_LETTERS), message.partition() or 0, key.decode(), value)

    def _dead_letter(self, offered: Offered, error: BadRecord) -> None:
        self._counts[f"refused_{error.reason}"] += 1
        request = offered.request
        key, value = dead_letter(
            self._kafka.topic(FM_REQUESTS), offered.partition, offered.offset, offered.append_ms,
            request.user.encode(), encode_fm_request(request), error,
        )  # fmt: skip
        self._send(self._kafka.topic(DEAD_LETTERS), offered.partition, key.decode(), value)


def _wall_ms() -> int:
    return int(time.time() * 1000)


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value

"""The client's side of ranking: asks for one, or watches all results of a run. Keeps the first result of a request.

In: requests that were sent, and `ranked-results`. Out: results with their latency. Never joins a group; a record there that is no
result is skipped and counted, since anybody may write to the topic.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from agents.kafka import ANSWER_S_MAX, KafkaConfig, answered, librdkafka_settings, partitions_of, passes
from schemas.errors import BadRecord, FatalError, SolarisError
from schemas.ranking import RankedResult, RankingRequest, decode_result, encode_request
from schemas.topics import RANKED_RESULTS, RANKING_REQUESTS

log = logging.getLogger("solaris.results")


class ResultReader:
    """Reads `ranked-results` from their end at the moment of creation, without a group. `refused`: records that are no results."""

    def __init__(self, kafka: KafkaConfig, *, from_start: bool = False, timeout_s: float = ANSWER_S_MAX) -> None:
        """FatalError, after `timeout_s` seconds, where no broker answers; TopicError without the topic."""
        self._kafka, self._timeout_s = kafka, timeout_s
        self._topic = kafka.topic(RANKED_RESULTS)
        self.refused = 0
        self._consumer = Consumer(
            librdkafka_settings(kafka)
            | {"group.id": f"reader-{uuid.uuid4()}", "enable.auto.commit": False, "fetch.wait.max.ms": 5,
               "auto.offset.reset": "earliest"}
        )  # fmt: skip
        partitions = partitions_of(self._consumer, kafka, self._topic, timeout_s)
        self._consumer.assign([self._at(number, from_start) for number in partitions])

    def _at(self, partition: int, from_start: bool) -> TopicPartition:
        at = TopicPartition(self._topic, partition)
        with answered(self._kafka, f"the end of {self._topic}-{partition}"):
            low, high = self._consumer.get_watermark_offsets(at, timeout=self._timeout_s)
        at.offset = low if from_start else high
        return at

    def poll(self, timeout_s: float, rows_max: int = 1_000) -> Iterator[tuple[RankedResult, Message]]:
        """The results that came within `timeout_s` seconds."""
        for message in arrived(self._consumer, rows_max, timeout_s):
            error: KafkaError | None = message.error()
            if error is not None:
                if passes(error):
                    continue
                raise FatalError(f"reading {self._topic} failed: {error.str()}")
            try:
                yield decode_result(message.value()), message
            except BadRecord as bad:
                self._refuse(message, bad)

    def _refuse(self, message: Message, bad: BadRecord) -> None:
        """Somebody else's record must not end what waits for ours: said once, counted always; speculate writes its dead letter."""
        self.refused += 1
        if self.refused == 1:
            log.warning(
                "%s-%d at offset %d is no result (%s): skipped, as others will be; look who writes to the topic",
                self._topic, message.partition(), message.offset(), bad,
            )  # fmt: skip

    def close(self) -> None:
        """Leave; nothing is committed."""
        self._consumer.close()


@dataclass(frozen=True)
class Answer:
    """A result and how long it took, from the send to the receipt, in ms."""

    result: RankedResult
    latency_ms: float


def rank(
    kafka: KafkaConfig,
    user: str,
    candidates: Iterable[str],
    *,
    ts: int | None = None,
    deadline_ms: int | None = None,
    timeout_s: float = 10.0,
) -> Answer:
    """Ask for one ranking and wait for its result.

    Raises `SolarisError` when none comes within `timeout_s` seconds, `FatalError` when the broker does not take the request.
    """
    request = RankingRequest(uuid.uuid4().hex, user, list(candidates), ts, deadline_ms)
    reader = ResultReader(kafka)
    try:
        producer = Producer(librdkafka_settings(kafka, producer=True) | {"linger.ms": 0})
        failed: list[KafkaError] = []
        started = time.monotonic()
        try:
            producer.produce(
                kafka.topic(RANKING_REQUESTS), encode_request(request), user.encode(),
                on_delivery=lambda error, _message: failed.append(error) if error is not None else None,
            )  # fmt: skip
        except KafkaException as error:
            raise FatalError(f"the request can't be sent: {error}") from error
        if producer.flush(timeout_s):
            raise FatalError(f"the request was not acknowledged within {timeout_s:g} s; is the broker up?")
        if failed:
            raise FatalError(f"the request was not taken: {failed[0].str()}")
        while (left := started + timeout_s - time.monotonic()) > 0:
            for result, _message in reader.poll(min(left, 0.05), rows_max=100):
                if result.request_id == request.request_id and result.user_id == user:
                    return Answer(result, (time.monotonic() - started) * 1000)
    finally:
        reader.close()
    raise SolarisError(
        f"no result for request {request.request_id} within {timeout_s:g} s; is a serve worker running (`solaris worker serve`)? "
        f"A refused request is on {kafka.topic_prefix}dead-letters"
    )


def arrived(consumer: Consumer, rows_max: int, timeout_s: float) -> list[Message]:
    """The first message within `timeout_s`, and what has come with it. (`Consumer.consume` would wait for `rows_max` of them.)"""
    first = consumer.poll(timeout_s)
    return [] if first is None else [first, *consumer.consume(rows_max, 0)]

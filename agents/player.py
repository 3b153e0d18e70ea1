"""A log's lines as live records: plays events and ranking requests onto their topics in the order of their `ts`.

In: a log folder, a speed, a span of event time. Out: records on `items`, `events` and `ranking-requests`, keyed by user.
Holds back while the workers lag, so that a fast playback measures the policy and not the machine. Never sends an outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, Message, Producer

from agents.kafka import KafkaConfig, librdkafka_settings
from agents.lag import Lag
from agents.results import ResultReader
from schemas.errors import FatalError
from schemas.events import Event, encode_event, encode_item
from schemas.log import Log, LoggedRequest, merge
from schemas.ranking import RankingRequest, encode_request
from schemas.topics import EVENTS, ITEMS, RANKING_REQUESTS, TopicSpec

FLUSH_S_MAX = 60.0
LAG_POLL_S = 0.02
PROGRESS_S = 0.1
STALL_S_MAX = 120.0


@dataclass
class Played:
    """What was sent, and what the broker acknowledged; `undelivered` must be 0 for the play to count as done."""

    events: int = 0
    requests: int = 0
    items: int = 0
    undelivered: int = 0
    held_s: float = 0.0
    last_ts: int = 0
    errors: dict[str, int] = field(default_factory=dict)


class Player:
    """Sends one log; `on_sent(record, ts)` is told of each record, `on_progress(Played)` about every 100 ms."""

    def __init__(
        self,
        kafka: KafkaConfig,
        *,
        speed: float = 0.0,
        lag: Lag | None = None,
        ahead_ms_max: int = 300_000,
        on_request: Callable[[LoggedRequest], None] | None = None,
        on_progress: Callable[[Played], None] | None = None,
    ) -> None:
        """`speed`: event time over wall time (60 = an hour a minute), 0 = as fast as `lag` allows. With `lag`, the workers finish
        each `ahead_ms_max` of event time before the next begins."""
        self._kafka, self._speed, self._lag, self._ahead_ms_max = kafka, speed, lag, ahead_ms_max
        self._on_request, self._on_progress = on_request, on_progress
        # Held back, a playback keeps cause and effect: what a user did after a request is sent only after its result came.
        self._reader = ResultReader(kafka) if lag is not None else None
        self._open: dict[str, set[str]] = {}
        self._producer = Producer(librdkafka_settings(kafka, producer=True) | {"linger.ms": 2, "acks": "all"})
        self.played = Played()

    def catalogue(self, log: Log) -> None:
        """Send every item of the log."""
        for item in log.items():
            self._send(ITEMS, str(item.item_id), encode_item(item))
            self.played.items += 1

    def play(self, log: Log, first_ts: int = 0, end_ts: int = 2**62) -> Played:
        """Send everything with first_ts <= ts < end_ts and wait until the broker has it.

        Raises `FatalError` when workers make no progress for two minutes. Undelivered records are counted, never hidden.
        """
        started, origin, reported = time.monotonic(), None, 0.0
        slice_ts = first_ts
        for ts, record in merge(log.events(), log.requests()):
            if not first_ts <= ts < end_ts:
                continue
            origin = ts if origin is None else origin
            if self._speed:
                self._sleep_until(started + (ts - origin) / 1000 / self._speed)
            if ts - slice_ts >= self._ahead_ms_max:
                self._hold()
                slice_ts = ts
            if time.monotonic() - reported >= PROGRESS_S:
                self._report()
                reported = time.monotonic()
            self._emit(record)
            self.played.last_ts = ts
        self.flush()
        return self.played

    def settle(self) -> None:
        """Wait until the workers have finished everything that was sent."""
        self._hold()

    def flush(self) -> None:
        """Wait for the broker's word on every record; what it did not acknowledge is `undelivered`."""
        left = self._producer.flush(FLUSH_S_MAX)
        if left:
            self._producer.purge()
            self._producer.flush(1.0)
        self._report()

    def _emit(self, record: Event | LoggedRequest) -> None:
        if isinstance(record, LoggedRequest):
            request = RankingRequest(
                record.request_id, record.user_id, record.candidates, record.ts, record.deadline_ms
            )
            if self._on_request is not None:
                self._on_request(record)
            self._send(RANKING_REQUESTS, str(record.user_id), encode_request(request))
            self.played.requests += 1
            if self._reader is not None:
                self._open.setdefault(str(record.user_id), set()).add(str(record.request_id))
        else:
            if str(record.user_id) in self._open:
                self._await(str(record.user_id))
            self._send(EVENTS, str(record.user_id), encode_event(record))
            self.played.events += 1

    def _send(self, topic: TopicSpec, key: str, value: bytes) -> None:
        while True:
            try:
                self._producer.produce(self._kafka.topic(topic), value, key.encode(), on_delivery=self._delivered)
                break
            except BufferError:
                self._producer.poll(0.05)
        self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self.played.undelivered += 1
            self.played.errors[error.str()] = self.played.errors.get(error.str(), 0) + 1

    def _sleep_until(self, due: float) -> None:
        while (left := due - time.monotonic()) > 0:
            self._producer.poll(min(left, 0.05))

    def _await(self, user: str) -> None:
        """Wait until every request of this user has its result."""
        assert self._reader is not None, "only a playback that is held back knows of open requests"
        deadline = time.monotonic() + STALL_S_MAX
        began = time.monotonic()
        while user in self._open:
            for result, _message in self._reader.poll(LAG_POLL_S):
                waiting = self._open.get(result.user_id)
                if waiting is not None:
                    waiting.discard(result.request_id)
                    if not waiting:
                        del self._open[result.user_id]
            self._producer.poll(0)
            if time.monotonic() > deadline:
                raise FatalError(
                    f"user {user} has had no result for {sorted(self._open[user])} for {STALL_S_MAX:g} s; look at the serve "
                    "worker's log and the dead letters"
                )
        self.played.held_s += time.monotonic() - began

    def _hold(self) -> None:
        """Wait until the broker has everything and the workers have finished it."""
        if self._lag is None:
            return
        self.flush()
        began = progressed = time.monotonic()
        least = behind = self._lag.rows()
        while behind:
            time.sleep(LAG_POLL_S)
            behind = self._lag.rows()
            if behind < least:
                least, progressed = behind, time.monotonic()
            if time.monotonic() - progressed > STALL_S_MAX:
                raise FatalError(
                    f"the workers are {behind} records behind and made no progress for {STALL_S_MAX:g} s: "
                    f"{self._lag.detail()}; look at their logs, and start those that are gone"
                )
        self.played.held_s += time.monotonic() - began

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.played)

"""A log's lines as live records: plays events and ranking requests onto their topics in the order of their `ts`.

In: a log folder, a speed, a span of event time. Out: records on `items`, `events` and `ranking-requests`, keyed by user.
Holds back while the workers lag, so that a fast playback measures the policy and not the machine, and keeps each user's records in
the order of cause and effect (agents/order.py). Never sends an outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agents.kafka import KafkaConfig
from agents.lag import Lag
from agents.order import Order
from agents.send import Sender
from schemas.errors import FatalError
from schemas.events import Event, encode_event, encode_item
from schemas.log import Log, LoggedRequest, merge
from schemas.ranking import RankingRequest, encode_request
from schemas.topics import EVENTS, ITEMS, RANKING_REQUESTS, TopicSpec

FLUSH_S_MAX = 60.0
LAG_POLL_S = 0.02
FOLD_POLL_S = 0.005
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
        self._order = Order(kafka, lag) if lag is not None else None
        self._sender = Sender(kafka, {"linger.ms": 2}, self._order.delivered if self._order is not None else None)
        self._reported = 0.0
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
        started, origin = time.monotonic(), None
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
            self._report_in_time()
            self._emit(record)
            self.played.last_ts = ts
        self.flush()
        return self.played

    def settle(self) -> None:
        """Wait until the workers have finished everything that was sent."""
        self._hold()

    def flush(self) -> None:
        """Wait for the broker's word on every record; what it did not acknowledge is `undelivered`."""
        if self._sender.flush(FLUSH_S_MAX):
            self._sender.give_up()
        self.played.errors = dict(self._sender.failed)
        self.played.undelivered = self._sender.failed.total()
        self._report()

    def _emit(self, record: Event | LoggedRequest) -> None:
        if isinstance(record, LoggedRequest):
            self._request(record)
        else:
            self._event(record)

    def _request(self, record: LoggedRequest) -> None:
        user, order = str(record.user_id), self._order
        if order is not None:
            self._wait(
                lambda: order.unfolded(user),
                FOLD_POLL_S,
                lambda left: f"serve has not folded the last {left} events before user {user}'s next request",
            )
            order.asked(user, str(record.request_id))
        if self._on_request is not None:
            self._on_request(record)
        request = RankingRequest(record.request_id, record.user_id, record.candidates, record.ts, record.deadline_ms)
        self._send(RANKING_REQUESTS, user, encode_request(request))
        self.played.requests += 1

    def _event(self, record: Event) -> None:
        user, order = str(record.user_id), self._order
        if order is not None:
            self._wait(
                lambda: len(order.unanswered(user, LAG_POLL_S)),
                0.0,
                lambda _left: f"user {user} has no result for {order.unanswered(user, 0)}",
            )
            order.did(user)
        self._send(EVENTS, user, encode_event(record))
        self.played.events += 1

    def _send(self, topic: TopicSpec, key: str, value: bytes) -> None:
        self._sender.send(self._kafka.topic(topic), key.encode(), value)

    def _sleep_until(self, due: float) -> None:
        while (left := due - time.monotonic()) > 0:
            self._sender.poll(min(left, 0.05))

    def _hold(self) -> None:
        """Wait until the broker has everything and the workers have finished it."""
        lag = self._lag
        if lag is None:
            return
        self.flush()
        self._wait(lag.rows, LAG_POLL_S, lambda left: f"the workers are {left} records behind ({lag.detail()})")

    def _wait(self, left: Callable[[], int], poll_s: float, said: Callable[[int], str]) -> None:
        """Until `left()` is 0, telling `on_progress` meanwhile. FatalError where it has not become less for `STALL_S_MAX`."""
        least = behind = left()
        if not behind:
            return
        began = progressed = time.monotonic()
        held_s = self.played.held_s
        while behind:
            self._sender.poll(poll_s)
            behind = left()
            now = time.monotonic()
            self.played.held_s = held_s + now - began
            self._report_in_time()
            if behind < least:
                least, progressed = behind, now
            if now - progressed > STALL_S_MAX:
                raise FatalError(
                    f"{said(behind)}, and nothing changed for {STALL_S_MAX:g} s; look at the workers' logs and the dead letters, "
                    "and start the workers that are gone"
                )

    def _report_in_time(self) -> None:
        if time.monotonic() - self._reported >= PROGRESS_S:
            self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        if self._on_progress is not None:
            self._on_progress(self.played)

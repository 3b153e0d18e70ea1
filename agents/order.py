"""One user's records in the order of cause and effect, for a playback that is faster than life.

In: what was sent and acknowledged, results, the serve group's commits. Out: how much is still open for a user. Never sends.

Two directions. What a user did after a request is sent after its result: else features hold outcomes. And a request is sent after
serve has folded what its user did before: topics are read independently, and requests go first, so it would be answered without.
That an event is folded shows in two places: a result names the offset that its partition's events had been folded to, and the
group's commit comes up to `commit_ms` after the fold. The later of both is what is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from confluent_kafka import KafkaError, Message

from agents.groups import group_id
from agents.kafka import KafkaConfig
from agents.lag import Lag
from agents.results import ResultReader
from schemas.ranking import RankedResult
from schemas.topics import EVENTS


@dataclass
class _Events:
    """A user's events that serve is not known to have folded: how many have no offset yet, and the next offset after the others."""

    unacknowledged: int = 0
    partition: int = -1
    next_offset: int = 0


class Order:
    """Of the users with something open: their requests, and their events."""

    def __init__(self, kafka: KafkaConfig, lag: Lag) -> None:
        self._reader = ResultReader(kafka)
        self._lag, self._group, self._topic = lag, group_id(kafka, "serve"), kafka.topic(EVENTS)
        self._asked: dict[str, set[str]] = {}
        self._events: dict[str, _Events] = {}
        self._folded: dict[int, int] = {}

    def asked(self, user: str, request_id: str) -> None:
        """A request goes out."""
        self._asked.setdefault(user, set()).add(request_id)

    def did(self, user: str) -> None:
        """An event goes out."""
        self._events.setdefault(user, _Events()).unacknowledged += 1

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        """The broker's word on a record; events are told by their topic. One that it refused will never be folded."""
        key = message.key()
        if message.topic() != self._topic or key is None:
            return
        events = self._events[key.decode() if isinstance(key, bytes) else key]
        events.unacknowledged -= 1
        if error is None:
            events.partition = message.partition() or 0
            events.next_offset = max(events.next_offset, (message.offset() or 0) + 1)

    def unanswered(self, user: str, wait_s: float) -> list[str]:
        """The user's requests without a result; takes the results of up to `wait_s` seconds if there are any."""
        if user in self._asked:
            self._take(wait_s)
        return sorted(self._asked.get(user, ()))

    def unfolded(self, user: str) -> int:
        """How many records (a bound) lie between what serve is known to have folded and the user's last event; 0 = it has it."""
        events = self._events.get(user)
        if events is None:
            return 0
        if events.unacknowledged:
            return events.unacknowledged
        if events.next_offset > self._folded.get(events.partition, 0):
            self._take(0)
        if events.next_offset > self._folded.get(events.partition, 0):
            for partition, offset in self._lag.committed(self._group, self._topic).items():
                self._reached(partition, offset)
        missing = events.next_offset - self._folded.get(events.partition, 0)
        if missing <= 0:
            del self._events[user]
        return max(0, missing)

    def close(self) -> None:
        """Stop reading results."""
        self._reader.close()

    def _take(self, wait_s: float) -> None:
        for result, _message in self._reader.poll(wait_s):
            self._reached(result.basis.partition, result.basis.events)
            self._answered(result)

    def _answered(self, result: RankedResult) -> None:
        waiting = self._asked.get(result.user_id)
        if waiting is not None:
            waiting.discard(result.request_id)
            if not waiting:
                del self._asked[result.user_id]

    def _reached(self, partition: int, offset: int) -> None:
        self._folded[partition] = max(offset, self._folded.get(partition, 0))

"""How far the workers are behind: for each group, records that lie in its topics and are not yet committed.

In: group → topics. Out: counts. Never joins a group or moves an offset.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from agents.kafka import KafkaConfig, librdkafka_settings
from schemas.errors import FatalError

TIMEOUT_S = 10.0
RETRY_S = 0.2


class Lag:
    """Lag of groups on the topics that each must finish; `groups` maps a group id to full topic names."""

    def __init__(self, kafka: KafkaConfig, groups: Mapping[str, Sequence[str]]) -> None:
        self._groups = {group: tuple(topics) for group, topics in groups.items()}
        # Consumers that never subscribe, so they join nothing. (An AdminClient's futures, asked fifty times a second, crashed.)
        self._consumers = {
            group: Consumer(librdkafka_settings(kafka) | {"group.id": group, "enable.auto.commit": False})
            for group in self._groups
        }
        self._any = next(iter(self._consumers.values()))
        metadata = self._any.list_topics(timeout=TIMEOUT_S).topics
        names = sorted({topic for topics in self._groups.values() for topic in topics})
        self._partitions = {name: sorted(metadata[name].partitions) for name in names}
        self._last: dict[str, int] = {}

    def rows(self) -> int:
        """Records in all that are not yet committed.

        The commits are read before the ends. So 0 means that the workers rest: whatever was on a topic when the ends were read had
        been committed before, and what it gave rise to had been acknowledged before that. (Ends first, an output could slip in.)
        """
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return self._read()
            except KafkaException as error:  # a broker that was paused or elects leaders answers so for a moment
                if time.monotonic() > deadline:
                    raise FatalError(f"the lag can't be read: {error}; check that the broker runs") from error
                time.sleep(RETRY_S)

    def _read(self) -> int:
        committed = {group: self._committed(group, topics) for group, topics in self._groups.items()}
        ends = self.ends()
        self._last = {
            group: sum(max(0, ends[place] - offset) for place, offset in offsets.items())
            for group, offsets in committed.items()
        }
        return sum(self._last.values())

    def detail(self) -> str:
        """The last reading as words."""
        return ", ".join(f"{group} {rows}" for group, rows in self._last.items())

    def ends(self) -> dict[tuple[str, int], int]:
        """End offset of every partition of the topics."""
        found = {}
        for topic, partitions in self._partitions.items():
            for number in partitions:
                at = TopicPartition(topic, number)
                found[topic, number] = self._any.get_watermark_offsets(at, timeout=TIMEOUT_S)[1]
        return found

    def _committed(self, group: str, topics: Sequence[str]) -> dict[tuple[str, int], int]:
        asked = [TopicPartition(topic, number) for topic in topics for number in self._partitions[topic]]
        return {
            (at.topic, at.partition): max(0, at.offset)
            for at in self._consumers[group].committed(asked, timeout=TIMEOUT_S)
        }

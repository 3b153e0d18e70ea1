"""How far the workers are behind: for each group, records that lie in its topics and are not yet committed.

In: group → topics. Out: counts. Never joins a group or moves an offset.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from agents.kafka import ANSWER_S_MAX, KafkaConfig, answered, librdkafka_settings, partitions_of

RETRY_S = 0.2


class Lag:
    """Lag of groups on the topics that each must finish; `groups` maps a group id to full topic names."""

    def __init__(
        self, kafka: KafkaConfig, groups: Mapping[str, Sequence[str]], timeout_s: float = ANSWER_S_MAX
    ) -> None:
        """`timeout_s`: how long a reading may take in all; FatalError after that."""
        self._kafka, self._timeout_s = kafka, timeout_s
        self._groups = {group: tuple(topics) for group, topics in groups.items()}
        # Consumers that never subscribe, so they join nothing. (An AdminClient's futures, asked fifty times a second, crashed.)
        self._consumers = {
            group: Consumer(librdkafka_settings(kafka) | {"group.id": group, "enable.auto.commit": False})
            for group in self._groups
        }
        self._any = next(iter(self._consumers.values()))
        names = sorted({topic for topics in self._groups.values() for topic in topics})
        self._partitions = {name: partitions_of(self._any, kafka, name, timeout_s) for name in names}
        self._last: dict[str, int] = {}

    def rows(self) -> int:
        """Records in all that are not yet committed.

        The commits are read before the ends. So 0 means that the workers rest: whatever was on a topic when the ends were read had
        been committed before, and what it gave rise to had been acknowledged before that. (Ends first, an output could slip in.)
        """
        deadline = time.monotonic() + self._timeout_s
        with answered(self._kafka, "the lag of the workers' groups"):
            while True:
                try:
                    return self._read(deadline)
                except KafkaException:  # a broker that was paused or elects leaders answers so for a moment
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(RETRY_S)

    def _read(self, deadline: float) -> int:
        committed = {group: self._committed(group, topics, deadline) for group, topics in self._groups.items()}
        ends = self._ends(deadline)
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
        with answered(self._kafka, "the ends of its topics"):
            return self._ends(time.monotonic() + self._timeout_s)

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Partition → the next offset that the group's members have finished and committed."""
        with answered(self._kafka, f"the offsets of group {group}"):
            found = self._committed(group, [topic], time.monotonic() + self._timeout_s)
        return {partition: offset for (_, partition), offset in found.items()}

    def _ends(self, deadline: float) -> dict[tuple[str, int], int]:
        found = {}
        for topic, partitions in self._partitions.items():
            for number in partitions:
                at = TopicPartition(topic, number)
                found[topic, number] = self._any.get_watermark_offsets(at, timeout=_left(deadline))[1]
        return found

    def _committed(self, group: str, topics: Sequence[str], deadline: float) -> dict[tuple[str, int], int]:
        asked = [TopicPartition(topic, number) for topic in topics for number in self._partitions[topic]]
        return {
            (at.topic, at.partition): max(0, at.offset)
            for at in self._consumers[group].committed(asked, timeout=_left(deadline))
        }


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())

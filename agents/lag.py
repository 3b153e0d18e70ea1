"""How far the workers are behind: for each group, records that lie in its topics and are not yet committed.

In: group → topics. Out: counts. Never joins a group or moves an offset.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka import admin as kafka_admin
from confluent_kafka.admin import AdminClient

from agents.kafka import KafkaConfig, librdkafka_settings
from schemas.errors import FatalError

TIMEOUT_S = 10.0
RETRY_S = 0.2


class Lag:
    """Lag of groups on the topics that each must finish; `groups` maps a group id to full topic names."""

    def __init__(self, kafka: KafkaConfig, groups: Mapping[str, Sequence[str]]) -> None:
        self._admin = AdminClient(librdkafka_settings(kafka))
        self._groups = {group: tuple(topics) for group, topics in groups.items()}
        metadata = self._admin.list_topics(timeout=TIMEOUT_S).topics
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
        ends = self._ends()
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
        return self._ends()

    def _ends(self) -> dict[tuple[str, int], int]:
        latest = vars(kafka_admin)["OffsetSpec"].latest()  # the package's types don't export it
        wanted = {TopicPartition(t, p): latest for t, parts in self._partitions.items() for p in parts}
        futures = self._admin.list_offsets(wanted, request_timeout=TIMEOUT_S)
        return {(at.topic, at.partition): future.result().offset for at, future in futures.items()}

    def _committed(self, group: str, topics: Sequence[str]) -> dict[tuple[str, int], int]:
        asked = ConsumerGroupTopicPartitions(group, [TopicPartition(t, p) for t in topics for p in self._partitions[t]])
        answer = self._admin.list_consumer_group_offsets([asked], request_timeout=TIMEOUT_S)[group].result()
        return {(at.topic, at.partition): max(0, at.offset) for at in answer.topic_partitions or ()}

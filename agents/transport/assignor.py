"""Who gets which partitions: whole (all topics of a partition together), even (counts differ by one at most), and sticky.

In: the group's members with what each held. Out: the partitions of each. Never: a topic without its partition's others.

Faust's own co-partitioned assignor is not sticky (two of four partitions change places when a third worker joins two), and
a partition that moves takes its state with it; without Faust tables it is not even used, but round-robin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from schemas.errors import TopicError

_VERSION = 0


def share_out(partitions: int, held: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """Partitions 0…n-1 for each member, from what each held: nobody has two more than another, and as few move as that allows."""
    least, extra = divmod(partitions, len(held))
    shares: dict[str, list[int]] = {}
    free = set(range(partitions))
    claims = {member: sorted(set(own) & free) for member, own in held.items()}
    for member in sorted(claims, key=lambda member: (-len(claims[member]), member)):
        own = [partition for partition in claims[member] if partition in free]
        more = extra > 0 and len(own) > least
        shares[member] = own[: least + more]
        extra -= more
        free.difference_update(shares[member])
    left = sorted(free)
    for member in sorted(shares, key=lambda member: (len(shares[member]), member)):
        while left and len(shares[member]) < least:
            shares[member].append(left.pop(0))
        if left and extra and len(shares[member]) == least:
            shares[member].append(left.pop(0))
            extra -= 1
    return {member: sorted(share) for member, share in shares.items()}


class CopartitionedAssignor(AbstractPartitionAssignor):  # type: ignore[misc] # aiokafka is not typed
    """Shares out partition numbers; each goes with all subscribed topics. Its name keeps members with another assignor out."""

    name = "solaris-copartitioned"

    def __init__(self) -> None:
        self._held: list[int] = []

    def metadata(self, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        """What a member tells the leader: its topics and what it holds."""
        return ConsumerProtocolMemberMetadata(_VERSION, sorted(topics), json.dumps(self._held).encode())

    def assign(self, cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
        """The leader's work. TopicError if members read different topics, or topics differ in their partition count."""
        subscriptions = {tuple(sorted(member.subscription)) for member in members.values()}
        if len(subscriptions) != 1:
            raise TopicError(f"members of one group must read the same topics, these read {sorted(subscriptions)}")
        (topics,) = subscriptions
        counts = {topic: len(cluster.partitions_for_topic(topic) or ()) for topic in topics}
        if len(set(counts.values())) != 1:
            raise TopicError(f"topics that are read together must have the same partition count, these have {counts}")
        held = {member: json.loads(metadata.user_data or b"[]") for member, metadata in members.items()}
        return {
            member: ConsumerProtocolMemberAssignment(
                _VERSION, [(topic, share) for topic in topics] if share else [], b""
            )
            for member, share in share_out(counts[topics[0]], held).items()
        }

    def on_assignment(self, assignment: ConsumerProtocolMemberAssignment) -> None:
        """Remember what is held now."""
        self._held = sorted({tp.partition for tp in assignment.partitions()})

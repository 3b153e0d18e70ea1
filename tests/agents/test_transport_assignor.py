"""Partitions are shared out whole, evenly, and with as few moves as that allows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from agents.transport.assignor import CopartitionedAssignor, share_out
from schemas.errors import TopicError

HELD = st.dictionaries(st.sampled_from([f"w{index}" for index in range(7)]), st.sets(st.integers(0, 11)), min_size=1)


@given(st.integers(1, 12), HELD)
def test_shares_are_complete_disjoint_and_even(partitions: int, held: dict[str, set[int]]) -> None:
    shares = share_out(partitions, held)
    assert set(shares) == set(held)
    assert sorted(partition for share in shares.values() for partition in share) == list(range(partitions))
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6))
def test_only_what_must_moves_when_workers_come_or_go(partitions: int, before: int, after: int) -> None:
    old = share_out(partitions, {f"w{index}": () for index in range(before)})
    new = share_out(partitions, {f"w{index}": old.get(f"w{index}", ()) for index in range(after)})
    moved = sum(len(set(new[member]) - set(old[member])) for member in new if member in old)
    stayed = [member for member in new if member in old]
    if after >= before:
        assert moved == 0, "a worker that stayed was given something while others joined"
    else:
        gone = partitions - sum(len(old[member]) for member in stayed)
        assert moved == gone


def test_sharing_out_again_changes_nothing() -> None:
    shares = share_out(4, {"a": (), "b": (), "c": ()})
    assert share_out(4, shares) == shares
    assert share_out(4, {"a": (0, 1), "b": (2, 3), "c": ()}) == {"a": [0, 1], "b": [2], "c": [3]}


def cluster(**counts: int) -> SimpleNamespace:
    return SimpleNamespace(partitions_for_topic=lambda topic: set(range(counts.get(topic, 0))))


def test_each_partition_goes_with_all_topics_and_members_tell_what_they_hold() -> None:
    first, second = CopartitionedAssignor(), CopartitionedAssignor()
    members = {"m1": first.metadata({"b", "a"}), "m2": second.metadata({"a", "b"})}
    assigned = first.assign(cluster(a=3, b=3), members)
    for assignor, member in ((first, "m1"), (second, "m2")):
        tps = assigned[member].partitions()
        numbers = {tp.partition for tp in tps}
        assert set(tps) == {TopicPartition(topic, number) for topic in "ab" for number in numbers}
        assignor.on_assignment(assigned[member])
    again = {"m1": first.metadata({"a", "b"}), "m2": second.metadata({"a", "b"})}
    assert first.assign(cluster(a=3, b=3), again)["m1"].partitions() == assigned["m1"].partitions()


def test_different_topics_or_counts_are_refused() -> None:
    assignor = CopartitionedAssignor()
    with pytest.raises(TopicError, match="same topics"):
        assignor.assign(cluster(a=3, b=3), {"m1": assignor.metadata({"a"}), "m2": assignor.metadata({"a", "b"})})
    with pytest.raises(TopicError, match="same partition count"):
        assignor.assign(cluster(a=3, b=4), {"m1": assignor.metadata({"a", "b"})})

"""Commits belong to the assignment that was sought: an older one never reaches the group, not even as a retry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import (
    IllegalGenerationError,
    KafkaConnectionError,
    OffsetMetadataTooLargeError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)

from agents.transport.fetch import BatchConsumerThread
from agents.transport.ledger import Commit

COMMITS = {("events", 0): Commit(7, "mark"), ("events", 1): Commit(9, "")}


class Coordinator:
    """aiokafka's, as far as a commit meets it; `answers` are what each request meets, in order."""

    def __init__(self, answers: list[Callable[[], None]]) -> None:
        self.generation = 3
        self.sent: list[dict[Any, Any]] = []
        self._answers = answers
        self._commit_lock = asyncio.Lock()
        self._subscription = SimpleNamespace(subscription=SimpleNamespace(assignment=object()))

    async def ensure_coordinator_known(self) -> None:
        await asyncio.sleep(0)

    async def _do_commit_offsets(self, _assignment: Any, offsets: dict[Any, Any]) -> None:
        self.sent.append(offsets)
        self._answers.pop(0)()

    def rejoin(self) -> None:
        """A new generation; its assignment comes later, when the group is synchronised."""
        self.generation += 1

    def reassign(self) -> None:
        self._subscription.subscription.assignment = object()


def thread(coordinator: Coordinator) -> BatchConsumerThread:
    made: Any = object.__new__(BatchConsumerThread)
    made._ensure_consumer = lambda: SimpleNamespace(_coordinator=coordinator)
    made._sought, made._generation = coordinator._subscription.subscription.assignment, coordinator.generation
    return made


def fails(error: Exception, *then: Callable[[], None]) -> Callable[[], None]:
    def answer() -> None:
        for step in then:
            step()
        raise error

    return answer


def commit(coordinator: Coordinator, before: Callable[[], None] = lambda: None) -> bool:
    member = thread(coordinator)
    before()
    return asyncio.run(member.in_thread_commit(COMMITS))


def test_the_offsets_and_marks_of_the_assignment_that_was_sought_are_committed() -> None:
    coordinator = Coordinator([lambda: None])
    assert commit(coordinator)
    (sent,) = coordinator.sent
    assert {(tp.topic, tp.partition): (held.offset, held.metadata) for tp, held in sent.items()} == COMMITS


@pytest.mark.parametrize("change", ["rejoin", "reassign"])
def test_after_a_rebalance_no_request_goes_out(change: str) -> None:
    coordinator = Coordinator([])
    assert not commit(coordinator, getattr(coordinator, change))
    assert coordinator.sent == []


@pytest.mark.parametrize("change", ["rejoin", "reassign"])
def test_a_commit_that_must_be_repeated_ends_when_the_group_rebalanced_meanwhile(change: str) -> None:
    coordinator = Coordinator([])
    coordinator._answers.append(fails(KafkaConnectionError(), getattr(coordinator, change)))
    assert not commit(coordinator)
    assert len(coordinator.sent) == 1


def test_a_commit_is_repeated_while_the_coordinator_is_away() -> None:
    coordinator = Coordinator([fails(KafkaConnectionError()), lambda: None])
    assert commit(coordinator)
    assert len(coordinator.sent) == 2


@pytest.mark.parametrize("error", [UnknownMemberIdError, IllegalGenerationError, RebalanceInProgressError])
def test_a_commit_that_the_group_refuses_is_no_failure(error: type[Exception]) -> None:
    coordinator = Coordinator([fails(error())])
    assert not commit(coordinator)


def test_any_other_error_is_raised() -> None:
    coordinator = Coordinator([fails(OffsetMetadataTooLargeError())])
    with pytest.raises(OffsetMetadataTooLargeError):
        commit(coordinator)

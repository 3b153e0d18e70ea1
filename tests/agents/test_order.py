"""Cause and effect in a playback: when a user's next record may go; without a broker."""

from __future__ import annotations

from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from agents.kafka import KafkaConfig
from agents.order import Order
from schemas.ranking import Basis, RankedResult
from schemas.topics import EVENTS, RANKING_REQUESTS

KAFKA = KafkaConfig()


class Record:
    """The broker's word on a record."""

    def __init__(self, user: str, partition: int, offset: int, topic: str = KAFKA.topic(EVENTS)) -> None:
        self._user, self._partition, self._offset, self._topic = user, partition, offset, topic

    def key(self) -> bytes:
        return self._user.encode()

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset


class World:
    """Lag and result reader in one: what the serve group has committed, and the results that have come."""

    def __init__(self) -> None:
        self.commits: dict[int, int] = {}
        self.results: list[RankedResult] = []
        self.readings = 0

    def committed(self, group: str, topic: str) -> dict[int, int]:
        assert (group, topic) == ("solaris.serve", "solaris.events")
        self.readings += 1
        return self.commits

    def poll(self, timeout_s: float) -> list[tuple[RankedResult, None]]:  # noqa: ARG002 - the reader's signature
        came, self.results = self.results, []
        return [(result, None) for result in came]

    def answer(self, user: str, request: str, partition: int, events: int) -> None:
        basis = Basis(partition, 0, events, 0, 0, "bundle", "config")
        self.results.append(RankedResult(request, user, 1, [], [], basis))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def order(world: World, monkeypatch: pytest.MonkeyPatch) -> Order:
    monkeypatch.setattr("agents.order.ResultReader", lambda kafka: world)  # noqa: ARG005
    return Order(KAFKA, cast(Any, world))


def sent(order: Order, user: str, partition: int, offset: int, error: KafkaError | None = None) -> None:
    order.did(user)
    order.delivered(error, cast(Any, Record(user, partition, offset)))


def test_a_request_waits_until_the_group_has_committed_the_user_s_last_event(order: Order, world: World) -> None:
    sent(order, "u", 2, 10)
    sent(order, "u", 2, 14)
    assert order.unfolded("stranger") == 0
    for committed, missing in ((0, 15), (11, 4), (14, 1), (15, 0), (15, 0)):
        world.commits = {1: 99, 2: committed}
        assert order.unfolded("u") == missing
    assert world.readings == 4, "once it is folded, nobody is asked again"


def test_an_event_that_is_not_acknowledged_has_no_offset_yet_and_is_waited_for(order: Order, world: World) -> None:
    world.commits = {0: 1_000}
    order.did("u")
    order.did("u")
    assert order.unfolded("u") == 2
    order.delivered(None, cast(Any, Record("u", 0, 5, KAFKA.topic(RANKING_REQUESTS))))
    order.delivered(None, cast(Any, Record("u", 0, 6)))
    assert order.unfolded("u") == 1
    order.delivered(None, cast(Any, Record("u", 0, 7)))
    assert order.unfolded("u") == 0


def test_a_result_of_the_same_partition_says_it_before_the_commit_does(order: Order, world: World) -> None:
    sent(order, "u", 2, 10)
    world.answer("other", "r", partition=2, events=10)
    assert order.unfolded("u") == 1
    world.answer("other", "s", partition=1, events=99)
    assert order.unfolded("u") == 1
    world.answer("other", "t", partition=2, events=11)
    assert order.unfolded("u") == 0


def test_an_event_that_the_broker_refused_is_not_waited_for(order: Order) -> None:
    sent(order, "u", 2, -1, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
    assert order.unfolded("u") == 0


def test_an_event_waits_for_the_results_of_all_requests_before_it(order: Order, world: World) -> None:
    order.asked("u", "a")
    order.asked("u", "b")
    world.answer("v", "a", 0, 0)
    world.answer("u", "b", 0, 0)
    assert order.unanswered("u", 0) == ["a"]
    assert order.unanswered("v", 0) == []
    world.answer("u", "a", 0, 0)
    assert order.unanswered("u", 0) == []

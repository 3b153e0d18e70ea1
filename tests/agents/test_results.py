"""The client's reader of results: what is no result is skipped, counted and said once; without a broker."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from agents.results import ResultReader
from schemas.errors import FatalError
from schemas.ranking import Basis, RankedResult, encode_result


class Message:
    def __init__(self, offset: int, value: bytes | None = None, code: int | None = None) -> None:
        self._offset, self._value, self._code = offset, value, code

    def error(self) -> KafkaError | None:
        return None if self._code is None else KafkaError(self._code)

    def value(self) -> bytes | None:
        return self._value

    def partition(self) -> int:
        return 2

    def offset(self) -> int:
        return self._offset


class Topic:
    """The consumer: everything has come already."""

    def __init__(self, *messages: Message) -> None:
        self._messages = list(messages)

    def poll(self, timeout_s: float) -> Message | None:  # noqa: ARG002 - the client's signature
        return self._messages.pop(0) if self._messages else None

    def consume(self, rows: int, timeout_s: float) -> list[Message]:  # noqa: ARG002
        came, self._messages = self._messages[:rows], self._messages[rows:]
        return came


def result(name: str) -> bytes:
    return encode_result(RankedResult(name, "u", 1, [], [], Basis(2, 0, 0, 0, 0, "b", "c")))


def reader(*messages: Message) -> ResultReader:
    made = ResultReader.__new__(ResultReader)
    made._topic, made._consumer, made.refused = "ranked-results", cast(Any, Topic(*messages)), 0
    return made


@pytest.mark.parametrize("bad", [b"not json", b"{}", b"\xff\xfe", b"", None])
def test_a_stranger_s_record_ends_nothing(bad: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    reading = reader(Message(0, bad), Message(1, result("a")), Message(2, bad), Message(3, result("b")))
    with caplog.at_level(logging.WARNING, logger="solaris.results"):
        assert [found.request_id for found, _ in reading.poll(0.1)] == ["a", "b"]
    assert reading.refused == 2
    (said,) = caplog.messages
    assert said.startswith("ranked-results-2 at offset 0 is no result")


def test_a_broker_that_is_away_for_a_moment_ends_nothing() -> None:
    reading = reader(Message(0, code=KafkaError._TRANSPORT), Message(1, result("a")))
    assert [found.request_id for found, _ in reading.poll(0.1)] == ["a"]


def test_what_does_not_pass_is_said() -> None:
    reading = reader(Message(0, code=KafkaError.TOPIC_AUTHORIZATION_FAILED))
    with pytest.raises(FatalError, match="reading ranked-results failed"):
        list(reading.poll(0.1))

"""What a client may count on: a request sent again gets the same bytes, and a request that is late gets an answer none the less."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schemas.events import Event, encode_event
from schemas.ranking import RankingRequest, decode_result
from schemas.topics import EVENTS
from tests.integration.fleet import until
from tests.integration.installation import Installation

USERS = [f"u{number}" for number in range(12)]
START_MS = 1_767_225_600_000
BACKLOG = 150

pytestmark = pytest.mark.timeout(150)


def test_a_request_sent_again_gets_the_same_bytes_and_a_late_one_gets_the_fallback(
    install: Callable[..., Installation],
) -> None:
    here = install()
    (serve,) = here.start("serve")
    asked = {user: RankingRequest("again", user, [f"i{n}" for n in range(10)], START_MS) for user in USERS}
    here.ask(*asked.values())
    here.settle()
    first = {key: values[0] for key, values in here.answers().items()}
    assert {user for user, _ in first} == set(USERS)

    _touch(here)  # another answer would come out of this, if it were made again
    here.ask(*asked.values())
    _assert_repeats(here, first, 2)

    serve.kill()
    (serve,) = here.start("serve")
    here.ask(*asked.values())
    _assert_repeats(here, first, 3)

    assert serve.stop() == 0
    (serve,) = here.start("serve")
    here.ask(*asked.values())
    _assert_repeats(here, first, 4)

    _assert_late_requests_get_the_fallback(here)


def _touch(here: Installation) -> None:
    for user in USERS:
        for number in range(10):
            event = Event(user, f"i{number}", "click", START_MS + 1_000 + number)
            here.send(EVENTS, user.encode(), encode_event(event))
    here.flush()
    here.settle()


def _assert_repeats(here: Installation, first: dict[tuple[str, str], bytes], times: int) -> None:
    """`times` results a request, all of them the very bytes of the first."""

    def counts() -> set[int]:
        answers = here.answers()
        return {len(answers[key]) for key in first}

    until(lambda: min(counts()) >= times, 30, lambda: f"{times} results a request: {counts()}")
    here.settle()
    answers = here.answers()
    assert {key: set(answers[key]) for key in first} == {key: {value} for key, value in first.items()}
    assert counts() == {times}


def _assert_late_requests_get_the_fallback(here: Installation) -> None:
    """A backlog lies there when serve starts: with a deadline of 1 ms all is late, with one of an hour nothing is."""
    serve = here.workers[-1]
    assert serve.stop() == 0
    late = [
        RankingRequest(f"late{number}", USERS[number % len(USERS)], ["i3", "i1", "i2"], START_MS + 5_000, 1)
        for number in range(BACKLOG)
    ]
    patient = [
        RankingRequest(f"patient{number}", user, ["i3", "i1", "i2"], START_MS + 5_000, 3_600_000)
        for number, user in enumerate(USERS)
    ]
    here.ask(*late, *patient)
    here.start("serve")
    here.settle()
    answers = here.answers()
    for request in (*late, *patient):
        (value,) = answers[str(request.user_id), str(request.request_id)]
        result = decode_result(value)
        assert ("deadline" in result.flags) == (request.deadline_ms == 1), request
        assert sorted(item.item_id for item in result.items) == ["i1", "i2", "i3"]

"""The answer log: the same bytes within ten minutes of event time, bounded, restorable."""

from __future__ import annotations

import pytest

from schemas.ranking import Basis, RankedResult, encode_result
from streams.answers import Answers

WINDOW = 600_000


def _answer(user: str, name: str, ts: int, note: str = "b") -> tuple[RankedResult, bytes]:
    result = RankedResult(name, user, ts, [], [], Basis(0, 0, 0, 0, 0, note, "c"))
    return result, encode_result(result)


@pytest.mark.parametrize(("later", "known"), [(0, True), (WINDOW - 1, True), (WINDOW, False), (-5, True)])
def test_an_answer_stands_for_the_window(later: int, known: bool) -> None:
    answers = Answers(10_000, WINDOW)
    answers.keep(*_answer("u", "r", 1_000_000))
    assert (answers.find("u", "r", 1_000_000 + later, 0) is not None) == known
    assert answers.find("r", "u", 1_000_000, 0) is None


def test_the_oldest_are_forgotten_when_full() -> None:
    answers = Answers(5_000, WINDOW)
    for number in range(50):
        answers.keep(*_answer("u", f"r{number}", number))
        assert answers.bytes <= 5_000
    kept = [number for number in range(50) if answers.find("u", f"r{number}", 50, 0)]
    assert kept == list(range(50 - len(answers), 50))
    assert answers.forgotten_early == 50 - len(answers) > 0


def test_what_no_longer_stands_is_forgotten_without_a_count() -> None:
    answers = Answers(1 << 20, WINDOW)
    answers.keep(*_answer("u", "r1", 0))
    answers.keep(*_answer("u", "r2", WINDOW))
    assert len(answers) == 1
    assert answers.forgotten_early == 0


def test_of_two_results_read_back_the_earlier_stands() -> None:
    answers = Answers(1 << 20, WINDOW)
    first, second, later = (_answer("u", "r", ts, note) for ts, note in ((5, "x"), (6, "y"), (5 + WINDOW, "z")))
    answers.remember([first, second])
    assert answers.find("u", "r", 6, 0) == first[1]
    answers.remember([later])
    answers.remember([first])
    assert answers.find("u", "r", 5 + WINDOW, 0) == later[1]
    assert answers.bytes == len(later[1]) + 300
    answers.keep(*second)
    answers.remember([first])  # older answers are read back while new ones are made
    assert answers.find("u", "r", 6, 0) == first[1]


def test_what_is_read_back_late_is_still_the_first_to_be_forgotten() -> None:
    answers = Answers(1 << 20, WINDOW)
    answers.keep(*_answer("u", "new", WINDOW - 1))
    answers.remember([_answer("u", "old", 7), _answer("u", "older", 0)])
    answers.keep(*_answer("u", "next", WINDOW))
    assert [answers.find("u", name, 8, 0) is not None for name in ("older", "old", "new")] == [False, True, True]
    answers.remember([])


def test_a_record_that_comes_again_gets_its_answer_however_late_and_only_once_more() -> None:
    answers = Answers(1 << 20, WINDOW)
    first, other = _answer("u", "r", 0), _answer("u", "r", 5)
    answers.expect([first, other], 3)
    assert answers.find("u", "r", 50 * WINDOW, 2) == first[1]
    assert answers.find("u", "r2", 50 * WINDOW, 2) is None
    assert answers.find("u", "r", 50 * WINDOW, 3) is None  # a new record: the window counts
    assert answers.find("u", "r", 50 * WINDOW, 2) is None

"""Infer: seven right and one error, each its own; a broken engine blames no record."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from schemas.errors import BadRecord, FatalError
from schemas.inference import Embeddings, FmRequest, decode_embeddings, encode_embeddings
from streams.infer import Answer, Infer
from tests.streams.fakes import FakeEngine


def _request(user: str, *items: str) -> FmRequest:
    n, empty = len(items), np.zeros(0, np.int64)
    return FmRequest(
        user, 7, 1, 100, 0, 0, list(items), np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.uint8), [],
        empty.astype(np.uint8), empty,
    )  # fmt: skip


def _same(one: Answer, other: Answer) -> bool:
    assert isinstance(one, Embeddings)
    assert isinstance(other, Embeddings)
    return encode_embeddings(one) == encode_embeddings(other)


@pytest.mark.parametrize("place", range(8))
def test_one_bad_request_fails_alone(place: int) -> None:
    requests = [_request(f"u{n}", f"a{n}", f"b{n}") for n in range(8)]
    alone = [Infer(FakeEngine()).run([request], [40 + n])[0] for n, request in enumerate(requests)]
    requests[place] = _request("bad", "x", "poison")
    infer = Infer(FakeEngine())
    answers = infer.run(requests, range(40, 48))
    for n, answer in enumerate(answers):
        if n == place:
            assert isinstance(answer, BadRecord)
            assert answer.reason == "handler"
            assert "the model refuses this item" in answer.sentence
        else:
            assert _same(answer, alone[n])
            assert isinstance(answer, Embeddings)
            assert answer.request_offset == 40 + n
    assert (infer.requests, infer.failed) == (8, 1)


def test_a_sound_batch_is_one_call() -> None:
    engine = FakeEngine()
    Infer(engine).run([_request("u", "a"), _request("v", "b")], [0, 1])
    assert engine.batches == [2]


def test_all_bad_ones_are_named_while_the_engine_is_sound() -> None:
    answers = Infer(FakeEngine()).run([_request("u", "poison"), _request("v", "poison")], [0, 1])
    assert [type(answer) for answer in answers] == [BadRecord, BadRecord]


def test_what_the_engine_refuses_itself_is_passed_on() -> None:
    infer = Infer(FakeEngine())
    fine, refused = infer.run([_request("u", "a"), _request("v", "unfit")], [0, 1])
    assert isinstance(fine, Embeddings)
    assert isinstance(refused, BadRecord)
    assert refused.reason == "length"
    assert (infer.failed, infer.bisected) == (1, 0)


def test_vectors_no_reader_would_take_are_left_out() -> None:
    infer = Infer(FakeEngine())
    some, none = infer.run([_request("u", "a", "nan", "b"), _request("v", "nan")], [5, 6])
    assert isinstance(some, Embeddings)
    assert some.items == ["a", "b"]
    assert decode_embeddings(encode_embeddings(some)).request_offset == 5
    assert isinstance(none, BadRecord)
    assert none.reason == "vector"
    assert infer.refused == 2


def test_nothing_in_nothing_out() -> None:
    engine = FakeEngine()
    assert Infer(engine).run([], []) == []
    assert engine.batches == []


class _Broken(FakeEngine):
    """An engine whose device is lost."""

    def embed(
        self, requests: Sequence[FmRequest], offsets: Sequence[int] | None = None
    ) -> list[Embeddings | BadRecord]:
        raise RuntimeError(f"no device for {len(requests)} requests at {offsets}")


class _Short(FakeEngine):
    """An engine that loses an answer."""

    def embed(
        self, requests: Sequence[FmRequest], offsets: Sequence[int] | None = None
    ) -> list[Embeddings | BadRecord]:
        return super().embed(requests, offsets)[1:]


class _Swapped(FakeEngine):
    """An engine that answers backwards."""

    def embed(
        self, requests: Sequence[FmRequest], offsets: Sequence[int] | None = None
    ) -> list[Embeddings | BadRecord]:
        return super().embed(requests, offsets)[::-1]


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [(_Broken(), "fails on every request"), (_Short(), "gave 1 answers to 2"), (_Swapped(), "answered user 'v'")],
)
def test_a_broken_engine_blames_no_record(engine: FakeEngine, sentence: str) -> None:
    with pytest.raises(FatalError, match=sentence):
        Infer(engine).run([_request("u", "a"), _request("v", "b")], [0, 1])

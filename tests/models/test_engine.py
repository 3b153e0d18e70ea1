"""The engine: answers in order, alone as in company, one bad request fails alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.bundle import Bundle, untrained_bundle
from models.engine import TOLERANCE, TOLERANCE_BF16, Engine, EngineConfig, round_up
from schemas.errors import BadRecord
from schemas.inference import Embeddings, FmRequest, decode_embeddings, encode_embeddings
from tests.models.made_up import Items, fm_request

SIZES = [(1, 0), (30, 120), (3, 5), (100, 100), (7, 0), (64, 33), (1, 1), (12, 60)]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return untrained_bundle(1, content_dims=4)


@pytest.fixture
def requests(bundle: Bundle) -> list[FmRequest]:
    return [fm_request(bundle.space, seed, items, rows) for seed, (items, rows) in enumerate(SIZES)]


def vectors(answer: Embeddings | BadRecord) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    assert isinstance(answer, Embeddings), answer
    return answer.codes * answer.scales[:, None]


@pytest.mark.parametrize("config", [EngineConfig(), EngineConfig(pairs_max=64, histories_max=2)])
def test_each_answer_is_its_own_and_equal_alone(
    bundle: Bundle, requests: list[FmRequest], config: EngineConfig
) -> None:
    engine = Engine(bundle, Items(), config=config)
    answers = engine.embed(requests, offsets=range(100, 108))
    alone = [engine.embed([request])[0] for request in requests]
    for index, (request, answer, one) in enumerate(zip(requests, answers, alone, strict=True)):
        assert isinstance(answer, Embeddings)
        assert (answer.user, answer.space, answer.as_of) == (request.user, request.space, request.as_of)
        assert (answer.items, answer.request_offset) == (request.items, 100 + index)
        np.testing.assert_allclose(vectors(answer), vectors(one), atol=0.02)  # one int8 step, where rounding tips
        assert decode_embeddings(encode_embeddings(answer)).items == request.items
    assert (
        np.abs(vectors(answers[1])[:1] - vectors(answers[3])[:1]).max() > 0.1
    )  # equality above is not that of constants


def test_the_fm_itself_is_the_same_in_company(bundle: Bundle, requests: list[FmRequest]) -> None:
    engine = Engine(bundle, Items())
    together = engine._vectors(requests)
    for request, own in zip(requests, together, strict=True):
        np.testing.assert_allclose(engine._vectors([request])[0], own, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("fault", ["space", "history", "item", "type"])
def test_one_bad_request_fails_alone(bundle: Bundle, requests: list[FmRequest], place: int, fault: str) -> None:
    bad = {
        "space": replace(requests[3], space=bundle.space ^ 1),
        "history": replace(requests[3], history_ts=requests[3].history_ts[1:]),
        "item": replace(requests[3], items=["", *requests[3].items[1:]]),
        "type": replace(requests[3], items=[None, *requests[3].items[1:]]),  # type: ignore[list-item]
    }[fault]
    batch = [*requests[:place], bad, *requests[place:]]
    engine = Engine(bundle, Items())
    answers = engine.embed(batch)
    failed = answers.pop(place)
    assert isinstance(failed, BadRecord)
    assert failed.reason == ("version" if fault == "space" else "length")
    for answer, good in zip(answers, engine.embed(requests), strict=True):
        np.testing.assert_allclose(vectors(answer), vectors(good), atol=0.02)


def test_an_item_without_a_usable_vector_is_left_out(bundle: Bundle) -> None:
    items = Items()
    request = fm_request(bundle.space, 1, 5, 0)
    items.content[items.intern(request.items)[2]] = np.nan
    engine = Engine(bundle, items)
    answer = engine.embed([request])[0]
    assert isinstance(answer, Embeddings)
    assert answer.items == [name for place, name in enumerate(request.items) if place != 2]
    items.content[:] = np.nan
    answers = engine.embed([request, replace(request, items=[])])
    assert isinstance(answers[0], BadRecord)
    assert answers[0].reason == "vector"
    assert isinstance(answers[1], Embeddings)
    assert answers[1].codes.shape == (0, bundle.d)


def test_only_the_newest_history_rows_count(bundle: Bundle) -> None:
    rows_max = bundle.foundation.config.history_rows
    request = fm_request(bundle.space, 1, 5, rows_max + 20)
    newest = replace(
        request,
        history_items=request.history_items[20:],
        history_types=request.history_types[20:],
        history_ts=request.history_ts[20:],
    )
    oldest = replace(newest, history_items=request.history_items[:-20])
    engine = Engine(bundle, Items())
    long, short, other = engine.embed([request, newest, oldest])
    np.testing.assert_allclose(vectors(long), vectors(short), atol=0.02)
    assert np.abs(vectors(long) - vectors(other)).max() > 0.05


def test_no_requests_no_answers(bundle: Bundle) -> None:
    assert Engine(bundle, Items()).embed([]) == []


def test_bf16_stays_within_its_tolerance(bundle: Bundle, requests: list[FmRequest]) -> None:
    plain, half = Engine(bundle, Items()), Engine(bundle, Items(), config=EngineConfig(precision="bf16"))
    assert 0 < plain.bf16_error() <= TOLERANCE_BF16
    gap = np.concatenate(plain._vectors(requests)) - np.concatenate(half._vectors(requests))
    assert 0 < np.sqrt(np.square(gap).mean()) <= TOLERANCE_BF16


def test_shapes_are_few() -> None:
    assert [round_up(n) for n in (0, 1, 8, 9, 16, 17, 1000)] == [8, 8, 8, 16, 16, 32, 1024]

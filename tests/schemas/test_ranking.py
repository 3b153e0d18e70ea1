"""Requests and results: the contract with the client."""

import json

import pytest

from schemas.errors import BadRecord
from schemas.export import FOLDER, rendered
from schemas.ranking import (
    Basis,
    RankedItem,
    RankedResult,
    decode_request,
    decode_result,
    encode_result,
    finite_score,
)

NOW = 1_780_000_000_000


def request(**fields: object) -> bytes:
    return json.dumps({"request_id": "r", "user_id": "u", "candidates": ["a", "b"], "ts": NOW} | fields).encode()


def test_duplicates_collapse_to_the_first() -> None:
    checked = decode_request(b"u", request(candidates=["i1", "i2", "i1", 3, "3"]), NOW, 5)
    assert checked.candidates == ["i1", "i2", "3"]
    assert checked.duplicates
    assert checked.offset == 5


def test_no_candidates_is_a_request() -> None:
    assert decode_request(b"u", request(candidates=[]), NOW, 0).candidates == []


def test_a_missing_ts_is_the_append_time() -> None:
    assert decode_request(b"u", request(ts=None), NOW, 0).ts == NOW


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"candidates": ["x"] * 1001}, "candidates"),
        ({"candidates": None}, "shape"),
        ({"candidates": [None]}, "shape"),
        ({"candidates": [""]}, "id_empty"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"user_id": "other"}, "key"),
        ({"ts": 5}, "ts_seconds"),
        ({"deadline_ms": "soon"}, "shape"),
    ],
)
def test_bad_requests_name_their_reason(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        decode_request(b"u", request(**fields), NOW, 0)
    assert caught.value.reason == reason


def test_results_are_strict_json() -> None:
    bad = RankedItem("b", finite_score(float("nan")), "none", bad_score=True)
    made = RankedResult(
        "r", "u", NOW, [RankedItem("a", 0.5, "exact", 7), bad], [], Basis(0, 1, 2, 3, 4, "bundle", "config")
    )
    data = encode_result(made)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(data, parse_constant=refuse)["items"][1] == {
        "item_id": "b",
        "score": None,
        "tier": "none",
        "bad_score": True,
    }
    assert decode_result(data) == made


def test_committed_json_schemas_are_what_the_types_say() -> None:
    assert {name: (FOLDER / name).read_text() for name in rendered()} == rendered()

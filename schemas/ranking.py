"""Ranking requests and ranked results: the contract with the client, JSON on both sides.

In: the bytes of a request. Out: a checked request with duplicates collapsed; and the strict JSON of a result that names
everything it rests on, so that anyone can derive the same bytes again.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from schemas.errors import BadRecord
from schemas.events import check_key, decode_json, valid_ts
from schemas.keys import valid_id

CANDIDATES_MAX = 1000

Tier = Literal["exact", "user", "neighbor", "none"]
TIERS: tuple[Tier, ...] = ("exact", "user", "neighbor", "none")
"""Tiers from best to worst; a tier's code is its index."""


class RankingRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request on `solaris.ranking-requests`, keyed by user id.

    `candidates`: 0 to 1,000; an empty list gets a result without items, and no flag for that (empty in, empty out).
    `ts` is event time in UTC ms (missing: the record's append time); `deadline_ms` counts from the append time.
    """

    request_id: str | int
    user_id: str | int
    candidates: list[str | int]
    ts: int | None = None
    deadline_ms: int | None = None


class RankedItem(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One item of a result: score (logit's sigmoid, None when not finite), the tier that served it, the vector's age."""

    item_id: str
    score: float | None
    tier: Tier
    age_ms: int | None = None
    shadow_score: float | None = None
    bad_score: bool = False


class Basis(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a result rests on: enough, with the logs and the bundle, to derive the same bytes again.

    Offsets are the *next* offset of each topic at the moment of the answer; `neighbors` names the generation by both offsets.
    """

    partition: int
    request_offset: int
    events: int
    embeddings: int
    items: int
    bundle: str
    config: str
    neighbors: tuple[int, int] | None = None


class RankedResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One result on `solaris.ranked-results`: items best first, ties by item id; `ts` is the `now` it was judged at.

    `items` is empty if, and only if, the request had no candidates: no flag says so. `flags`: degraded (state is not restored yet),
    deadline (answered in fallback order), duplicate_candidates (the first of each was kept).
    """

    request_id: str
    user_id: str
    ts: int
    items: list[RankedItem]
    flags: list[str]
    basis: Basis
    version: int = 1


class CheckedRequest(msgspec.Struct, frozen=True):
    """A request as the core sees it: valid ids, candidates without duplicates, event time filled in."""

    request_id: str
    user: str
    candidates: list[str]
    ts: int
    append_ms: int
    deadline_ms: int | None
    duplicates: bool
    offset: int


_request_decoder = msgspec.json.Decoder(RankingRequest)
_result_decoder = msgspec.json.Decoder(RankedResult)


def decode_request(key: bytes | None, value: bytes | None, append_ms: int, offset: int) -> CheckedRequest:
    """One checked request; raises `BadRecord` with the reason."""
    request = decode_json(_request_decoder, value)
    user = valid_id(request.user_id, "user_id")
    check_key(key, user)
    request_id = _valid_request_id(request.request_id)
    if len(request.candidates) > CANDIDATES_MAX:
        raise BadRecord("candidates", f"{len(request.candidates)} candidates; send at most {CANDIDATES_MAX}")
    ids = [valid_id(item, "candidates") for item in request.candidates]
    unique = list(dict.fromkeys(ids))
    ts = valid_ts(request.ts, append_ms)
    return CheckedRequest(request_id, user, unique, ts, append_ms, request.deadline_ms, len(unique) != len(ids), offset)


def _valid_request_id(value: str | int) -> str:
    try:
        return valid_id(value, "request_id")
    except BadRecord as error:
        raise BadRecord("request_id", error.sentence) from None


def encode_request(request: RankingRequest) -> bytes:
    """JSON of one request."""
    return msgspec.json.encode(request)


def encode_result(result: RankedResult) -> bytes:
    """Strict JSON of one result: a score that is not finite can't get here (`finite_score`)."""
    return msgspec.json.encode(result)


def decode_result(value: bytes | None) -> RankedResult:
    """One result; raises `BadRecord`."""
    return decode_json(_result_decoder, value)


def finite_score(score: float) -> float | None:
    """The score, or None where JSON has no word for it."""
    return score if math.isfinite(score) else None

"""Rank: from scores to the ordered result that names what it rests on.

In: a request, its candidates' scores, tiers and ages. Out: a `RankedResult`, best first. Never scores, never reads state, and never
lets a number that is not finite decide an order or reach the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from models.features import I64
from schemas.ranking import TIERS, Basis, CheckedRequest, RankedItem, RankedResult


def order(scores: Sequence[float], names: Sequence[str]) -> list[int]:
    """Places best first: higher score, then item id (by code point); scores that are not finite last, by item id."""
    good = [
        (-score, name, at) for at, (score, name) in enumerate(zip(scores, names, strict=True)) if math.isfinite(score)
    ]
    good.sort()
    places = [at for _, _, at in good]
    if len(good) < len(names):
        bad = sorted((name, at) for at, name in enumerate(names) if not math.isfinite(scores[at]))
        places += [at for _, at in bad]
    return places


def ranked(
    request: CheckedRequest,
    now: int,
    scores: Sequence[float],
    shadow: Sequence[float] | None,
    tiers: Sequence[int],
    ages_ms: Sequence[int],
    basis: Basis,
    flags: Sequence[str] = (),
) -> RankedResult:
    """The result of one request whose candidates have these scores; `shadow` are the base ranker's on the same candidates."""
    names = request.candidates
    items = []
    for at in order(scores, names):
        score, age = scores[at], ages_ms[at]
        finite = math.isfinite(score)
        shadowed = None if shadow is None or not math.isfinite(shadow[at]) else shadow[at]
        items.append(
            RankedItem(
                names[at], score if finite else None, TIERS[tiers[at]], age if age >= 0 else None, shadowed, not finite
            )
        )
    return RankedResult(request.request_id, request.user, now, items, _flags(request, flags), basis)


def fallback(request: CheckedRequest, now: int, counts: I64, basis: Basis, flags: Sequence[str] = ()) -> RankedResult:
    """The answer to a request that is past its deadline: by positives in 24 h, then impressions, then item id; no scores.

    `counts` int64 [n, 2] are the items' (impressions, positives). No model runs, so a backlog of late requests is quickly gone.
    """
    keyed = sorted((-up, -shown, name) for (shown, up), name in zip(counts.tolist(), request.candidates, strict=True))
    items = [RankedItem(name, None, "none") for _, _, name in keyed]
    return RankedResult(request.request_id, request.user, now, items, _flags(request, [*flags, "deadline"]), basis)


def _flags(request: CheckedRequest, flags: Sequence[str]) -> list[str]:
    return [*flags, "duplicate_candidates"] if request.duplicates else list(flags)

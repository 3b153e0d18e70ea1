"""Rank: from scores to the ordered result that names what it rests on.

In: a request, its candidates' scores, tiers and ages. Out: a `RankedResult`, best first. Never scores, never reads state, and never
lets a number that is not finite decide an order or reach the JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from models.features import I64, U8
from schemas.ranking import TIERS, Basis, CheckedRequest, RankedItem, RankedResult

F64 = npt.NDArray[np.float64]
Columns = tuple[F64, F64 | None, U8, I64]
"""Of n candidates: scores, the base ranker's (None = off), tiers, ages."""


def order(scores: F64, names: Sequence[str]) -> list[int]:
    """Places best first: higher score, then item id (by code point); scores that are not finite last, by item id."""
    places = np.argsort(-scores, kind="stable")
    falling = scores[places]
    if (falling[:-1] > falling[1:]).all() and np.isfinite(scores).all():
        usual: list[int] = places.tolist()  # no ties, all finite
        return usual
    bad = ~np.isfinite(scores)
    keys = list(zip(bad.tolist(), np.where(bad, 0.0, -scores).tolist(), names, range(len(names)), strict=True))
    return [at for _, _, _, at in sorted(keys)]


def ranked(
    requests: Sequence[CheckedRequest],
    nows: Sequence[int],
    scores: F64,
    shadow: F64 | None,
    tiers: U8,
    ages_ms: I64,
    bases: Sequence[Basis],
    flags: Sequence[str] = (),
) -> Iterator[RankedResult]:
    """Results of r requests with n candidates in all; the columns are [n], `shadow` the base ranker's scores of the candidates."""
    score, tier = _finite_or_none(scores), [TIERS[code] for code in tiers.tolist()]
    other = [None] * len(score) if shadow is None else _finite_or_none(shadow)
    age = [value if value >= 0 else None for value in ages_ms.tolist()]
    bad = (~np.isfinite(scores)).tolist()
    start = 0
    for request, now, basis in zip(requests, nows, bases, strict=True):
        names = request.candidates
        end = start + len(names)
        items = [
            RankedItem(
                names[at], score[start + at], tier[start + at], age[start + at], other[start + at], bad[start + at]
            )
            for at in order(scores[start:end], names)
        ]
        start = end
        yield RankedResult(request.request_id, request.user, now, items, _flags(request, flags), basis)


def fallback(request: CheckedRequest, now: int, counts: I64, basis: Basis, flags: Sequence[str] = ()) -> RankedResult:
    """The answer to a request that is past its deadline: by positives in 24 h, then impressions, then item id; no scores.

    `counts` int64 [n, 2] are the items' (impressions, positives). No model runs, so a backlog of late requests is quickly gone.
    """
    keyed = sorted((-up, -shown, name) for (shown, up), name in zip(counts.tolist(), request.candidates, strict=True))
    items = [RankedItem(name, None, "none") for _, _, name in keyed]
    return RankedResult(request.request_id, request.user, now, items, _flags(request, [*flags, "deadline"]), basis)


def _flags(request: CheckedRequest, flags: Sequence[str]) -> list[str]:
    return [*flags, "duplicate_candidates"] if request.duplicates else list(flags)


def _finite_or_none(numbers: F64) -> list[float | None]:
    values: list[float | None] = numbers.tolist()
    for at in np.flatnonzero(~np.isfinite(numbers)).tolist():
        values[at] = None
    return values

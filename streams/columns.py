"""The columns of features: for each pair what its user's past, its counters and the catalogue say, in compiled loops.

In: histories of r requests end to end, rows of the item index, counts. Out: the arrays of `models.features.Features`, written in
place. The semantics of every column stand in `models.features.DENSE`. A pair's numbers depend on its own request alone.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from models.features import DENSE, F32, I32, I64, SHORT_HISTORY, U8
from models.jit import compiled, number, reads, writes

RATE_PRIOR = (1.0, 9.0)
"""Positives and negatives that every item and user starts with: a rate of one in ten until the log says more."""

PROFILE_DECAY_MS = 24 * 3_600_000
"""A history row's weight in the content profile falls by e over this age, counted from the user's newest row."""

_HOUR_MS = 3_600_000.0
_HOURS_MAX = 24.0 * 30
"""log1p of it is AGE_NEVER."""
_DAY_MS = 86_400_000
_POSITIVES_PRIOR, _NEGATIVES_PRIOR = RATE_PRIOR
REQUEST_COLUMNS = 7
"""Columns that are the same for all pairs of a request."""

F64 = npt.NDArray[np.float64]


@compiled(
    reads(np.int32), reads(np.int64), reads(np.int64), reads(np.int64), reads(np.int64),
    reads(np.float32, 2), reads(np.int64, 2), writes(np.float64, 2), writes(np.float64, 2),
)  # fmt: skip
def request_columns(
    past_rows: I32, past_ts: I64, past_starts: I64, past_ends: I64, now: I64,
    catalogue: F32, user_counts: I64, columns: F64, profile: F64,
) -> None:  # fmt: skip
    """Per request [r, 7] the user's two counters and rate, history_log, idle, hour_sin, hour_cos; and `profile` [r, c + 1], the
    decayed sum of its history's content and, last, that sum's square."""
    for q in range(len(now)):
        start, end = past_starts[q], past_ends[q]
        count, positive = user_counts[q, 0], user_counts[q, 1]
        negative = max(count - positive, 0)
        columns[q, 0], columns[q, 1] = math.log1p(count), math.log1p(positive)
        columns[q, 2] = math.log1p(positive + (_POSITIVES_PRIOR - 1.0)) - math.log1p(
            negative + (_NEGATIVES_PRIOR - 1.0)
        )
        columns[q, 3] = math.log1p(end - start)
        idle = _HOURS_MAX
        if end > start:
            idle = min(max(now[q] - past_ts[end - 1], 0) / _HOUR_MS, _HOURS_MAX)
        columns[q, 4] = math.log1p(idle)
        angle = (now[q] % _DAY_MS) * (2.0 * math.pi / _DAY_MS)
        columns[q, 5], columns[q, 6] = math.sin(angle), math.cos(angle)
        dims = catalogue.shape[1]
        for k in range(dims + 1):
            profile[q, k] = 0.0
        for j in range(start, end):
            weight = math.exp((past_ts[end - 1] - past_ts[j]) / -PROFILE_DECAY_MS)
            for k in range(dims):
                profile[q, k] += catalogue[past_rows[j], k] * weight
        for k in range(dims):
            profile[q, dims] += profile[q, k] * profile[q, k]


@compiled(
    reads(np.int32), reads(np.int32), reads(np.int64),
    reads(np.int32), reads(np.int64), reads(np.int64), reads(np.int64),
    reads(np.int32), reads(np.int64), reads(np.int64), reads(np.int64),
    reads(np.int32), reads(np.float32, 2), number(np.int32), reads(np.int64, 2), reads(np.float64, 2), reads(np.float64, 2),
    writes(np.float32, 2),
)  # fmt: skip
def pair_columns(
    request: I32, item_rows: I32, now: I64,
    past_rows: I32, past_ts: I64, past_starts: I64, past_ends: I64,
    seen_rows: I32, seen_ts: I64, seen_starts: I64, seen_ends: I64,
    category: I32, catalogue: F32, category_unknown: int, item_counts: I64, of_request: F64, profile: F64,
    dense: F32,
) -> None:  # fmt: skip
    """Every dense column of every pair, float32 [n, len(DENSE)]. `category` and `catalogue` are the item index's."""
    dims = catalogue.shape[1]
    for i in range(len(request)):
        q, item, at = request[i], item_rows[i], now[request[i]]
        impressions, positive = item_counts[i, 0], item_counts[i, 1]
        negative = max(impressions - positive, 0)
        dense[i, 0], dense[i, 1] = math.log1p(impressions), math.log1p(positive)
        dense[i, 2] = math.log1p(positive + (_POSITIVES_PRIOR - 1.0)) - math.log1p(negative + (_NEGATIVES_PRIOR - 1.0))
        kind, start, end = category[item], past_starts[q], past_ends[q]
        touched, akin, last_touched, last_akin = 0, 0, -1, -1
        for j in range(start, end):
            if past_rows[j] == item:
                touched += 1
                last_touched = j
            if category[past_rows[j]] == kind:
                akin += 1
                last_akin = j
        if kind == category_unknown:
            akin, last_akin = 0, -1
        shown, last_shown = 0, -1
        for j in range(seen_starts[q], seen_ends[q]):
            if seen_rows[j] == item:
                shown += 1
                last_shown = j
        dense[i, 6], dense[i, 8] = math.log1p(touched), math.log1p(shown)
        hours = _HOURS_MAX
        if last_touched >= 0:
            hours = min(max(at - past_ts[last_touched], 0) / _HOUR_MS, _HOURS_MAX)
        dense[i, 7] = math.log1p(hours)
        hours = _HOURS_MAX
        if last_shown >= 0:
            hours = min(max(at - seen_ts[last_shown], 0) / _HOUR_MS, _HOURS_MAX)
        dense[i, 9] = math.log1p(hours)
        hours = _HOURS_MAX
        if last_akin >= 0:
            hours = min(max(at - past_ts[last_akin], 0) / _HOUR_MS, _HOURS_MAX)
        dense[i, 10], dense[i, 11] = akin / max(end - start, 1), math.log1p(hours)
        dot, square = 0.0, 0.0
        for k in range(dims):
            dot += catalogue[item, k] * profile[q, k]
            square += catalogue[item, k] * catalogue[item, k]
        norm = square * profile[q, dims]
        dense[i, 12] = dot / math.sqrt(norm) if norm > 0.0 else 0.0
        for k in range(3):
            dense[i, 3 + k] = of_request[q, k]
        for k in range(3, REQUEST_COLUMNS):
            dense[i, 10 + k] = of_request[q, k]


@compiled(
    reads(np.int32), reads(np.int64), reads(np.uint8), reads(np.int64), reads(np.int64), reads(np.int64),
    reads(np.int32), reads(np.int32),
    writes(np.int32, 2), writes(np.int32, 2), writes(np.uint8, 2), writes(np.float32, 2),
)  # fmt: skip
def short_histories(
    past_rows: I32, past_ts: I64, past_types: U8, past_starts: I64, past_ends: I64, now: I64,
    buckets: I32, categories: I32,
    bucket: I32, category: I32, types: U8, ages: F32,
) -> None:  # fmt: skip
    """The newest rows of each history, [r, SHORT_HISTORY], newest first; empty places are -1, type and age 0."""
    for q in range(len(now)):
        for place in range(SHORT_HISTORY):
            j = past_ends[q] - 1 - place
            if j < past_starts[q]:
                bucket[q, place], category[q, place], types[q, place], ages[q, place] = -1, -1, 0, 0.0
            else:
                bucket[q, place], category[q, place] = buckets[past_rows[j]], categories[past_rows[j]]
                types[q, place] = past_types[j]
                ages[q, place] = math.log1p(max(now[q] - past_ts[j], 0) / _HOUR_MS)


assert len(DENSE) == 10 + REQUEST_COLUMNS, "a dense feature came or went: write its column here"

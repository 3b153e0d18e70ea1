"""Features: what a ranker sees of r requests with n pairs, built from histories, counters and the item index.

In: per request the user, its two histories and `now`; per pair the item's row and its counters. Out: `models.features.Features`.
Never reads a store, a clock or a vector. A pair's numbers depend on its own request alone, so that a request gets the same bytes
alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from models.features import DENSE, F32, I32, I64, SHORT_HISTORY, U8, Features
from schemas.keys import hash64
from streams.history import HistoryRow
from streams.items import CATEGORY_UNKNOWN, ItemIndex

F64 = npt.NDArray[np.float64]

RATE_PRIOR = (1.0, 9.0)
"""Positives and negatives that every item and user starts with: a rate of one in ten until the log says more."""

PROFILE_DECAY_MS = 24 * 3_600_000
"""A history row's weight in the content profile falls by e over this age, counted from the user's newest row."""

USER_BUCKET_MASK = 0x7FFF_FFFF
"""A user's bucket is its hash's low 31 bits; a ranker takes it modulo its own table."""

_HOUR_MS = 3_600_000.0
_HOURS_MAX = 24.0 * 30
"""log1p of it is AGE_NEVER."""
_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class _Past:
    """Histories of r requests end to end: request r's rows are [starts[r], ends[r]), newest last."""

    rows: I32
    category: I32
    ts: I64
    types: U8
    owner: I64
    starts: I64
    ends: I64


def build_features(
    users: Sequence[str],
    histories: Sequence[HistoryRow],
    shown: Sequence[HistoryRow],
    now: I64,
    request: I32,
    item_rows: I32,
    items: ItemIndex,
    item_counts: I64,
    user_counts: I64,
) -> Features:
    """Features of n pairs of r requests; the semantics of every dense column stand in `models.features.DENSE`.

    `users`, `histories`, `shown` have r entries, `now` int64 [r] is event time in UTC ms, `request` int32 [n] says which request a
    pair belongs to, `item_rows` int32 [n] are rows of `items`; `item_counts` int64 [n, 2] and `user_counts` int64 [r, 2] are
    impressions and positives in the last 24 h.
    """
    n = len(item_rows)
    past, seen = _join(histories, shown, items)
    category = items.category[item_rows]
    count, last = _matches(past, seen, request, item_rows, category)
    content = items.content[item_rows]
    columns = np.empty((len(DENSE), n), np.float32)
    of_pairs = _logs(item_counts, np.concatenate((count[:2], _hours(now[request], last))))
    columns[0:3], columns[6:10], columns[11] = of_pairs[:3], of_pairs[[3, 5, 4, 6]], of_pairs[7]
    length = past.ends - past.starts
    of_users = _user_columns(past, length, now, user_counts)[:, request]
    columns[3:6], columns[13:] = of_users[:3], of_users[3:]
    columns[10] = count[2] / np.maximum(length, 1)[request]
    columns[12] = _profile_content(past, items.content, content, request)
    user_bucket = np.fromiter((hash64(user) & USER_BUCKET_MASK for user in users), np.int32, len(users))
    dense = np.ascontiguousarray(columns.T)
    return Features(
        request,
        items.bucket[item_rows],
        category,
        content,
        dense,
        user_bucket,
        *_short_history(past, items.bucket, now),
    )


def _join(histories: Sequence[HistoryRow], shown: Sequence[HistoryRow], items: ItemIndex) -> tuple[_Past, _Past]:
    """Both kinds of history end to end, their items interned in one call."""
    names = list(chain.from_iterable(row.items for row in chain(histories, shown)))
    rows = items.intern(names) if names else np.empty(0, np.int32)
    first = _concatenate(histories, rows, items)
    return first, _concatenate(shown, rows[len(first.rows) :], items)


def _concatenate(histories: Sequence[HistoryRow], rows: I32, items: ItemIndex) -> _Past:
    lengths = np.fromiter((len(row.items) for row in histories), np.int64, len(histories))
    ends = np.cumsum(lengths)
    mine = rows[: int(ends[-1]) if len(ends) else 0]
    return _Past(
        rows=mine,
        category=items.category[mine],
        ts=np.concatenate([row.ts for row in histories]) if histories else np.empty(0, np.int64),
        types=np.concatenate([row.types for row in histories]) if histories else np.empty(0, np.uint8),
        owner=np.repeat(np.arange(len(histories)), lengths),
        starts=ends - lengths,
        ends=ends,
    )


def _matches(past: _Past, seen: _Past, request: I32, item_rows: I32, category: I32) -> tuple[I64, I64]:
    """Per pair the number of rows of its request, and the `ts` of the last of them (-1 = none), both int64 [3, n]: history rows
    of the item, impressions of the item, history rows in the item's category.

    One sort for all three and the whole batch: (kind and owner, key, position) packed into an integer, so that what belongs to a
    pair lies side by side.
    """
    r, n = len(past.ends), len(item_rows)
    keys = np.concatenate((past.rows, seen.rows, past.category))
    if not len(keys) or not n:
        return np.zeros((3, n), np.int64), np.full((3, n), -1, np.int64)
    owner = np.concatenate((past.owner, seen.owner + r, past.owner + 2 * r))
    wanted = np.concatenate((item_rows, item_rows, category))
    span, shift = int(max(keys.max(), wanted.max())) + 1, len(keys).bit_length()
    assert 3 * r * span < 1 << (63 - shift), "too many requests in one batch to pack"
    packed = np.sort(((owner * span + keys) << shift) + np.arange(len(keys)))
    kind = np.arange(3)[:, None] * r
    sought = ((request + kind) * span + wanted.reshape(3, n)) << shift
    left, right = packed.searchsorted(np.stack((sought, sought + (1 << shift))))
    count = right - left
    count[2, category == CATEGORY_UNKNOWN] = 0
    ts = np.concatenate((past.ts, seen.ts, past.ts))
    newest = ts[packed[np.maximum(right - 1, 0)] & ((1 << shift) - 1)]
    return count, np.where(count > 0, newest, -1)


def _logs(counts: I64, more: F64) -> F64:
    """[3 + m, n] of counts [n, 2] and m more rows [m, n]: log1p impressions, log1p positives, logit of the smoothed rate, and log1p
    of the others. Where a log has no impressions, positives stand alone."""
    impressions, positives = counts[:, 0], counts[:, 1]
    rows = np.empty((4 + len(more), len(counts)))
    rows[0], rows[1], rows[2], rows[3:-1] = impressions, positives, positives + (RATE_PRIOR[0] - 1.0), more
    rows[-1] = np.maximum(impressions - positives, 0) + (RATE_PRIOR[1] - 1.0)
    np.log1p(rows, out=rows)
    rows[2] -= rows[-1]
    return rows[:-1]


def _hours(now: I64, last: I64) -> F64:
    """Hours since `last`, at most a month, which also stands where there is none (-1)."""
    return np.where(last < 0, _HOURS_MAX, np.minimum(np.maximum(now - last, 0) / _HOUR_MS, _HOURS_MAX))


def _profile_content(past: _Past, catalogue: F32, content: F32, request: I32) -> F32:
    """Cosine of each pair's content with the decayed mean content of its history; 0 where either has none."""
    busy = past.ends > past.starts
    profile = np.zeros((len(busy), content.shape[1]), np.float32)
    if busy.any() and content.shape[1]:
        newest = past.ts[past.ends[busy] - 1]
        age = np.repeat(newest, (past.ends - past.starts)[busy]) - past.ts
        weight = np.exp(age / -PROFILE_DECAY_MS).astype(np.float32)
        profile[busy] = np.add.reduceat(catalogue[past.rows] * weight[:, None], past.starts[busy], axis=0)
    dot = np.einsum("ij,ij->i", content, profile[request])
    norms = np.einsum("ij,ij->i", content, content) * np.einsum("ij,ij->i", profile, profile)[request]
    cosine: F32 = np.divide(dot, np.sqrt(norms), out=np.zeros_like(dot), where=norms > 0)
    return cosine


def _user_columns(past: _Past, length: I64, now: I64, counts: I64) -> F64:
    """[7, r]: the user's two counters and rate, history_log, idle, hour_sin, hour_cos (the hour of the day is UTC event time)."""
    newest = np.concatenate((past.ts, [-1]))[np.where(length > 0, past.ends - 1, len(past.ts))]
    angle = (now % _DAY_MS) * (2.0 * np.pi / _DAY_MS)
    logs = _logs(counts, np.stack((length, _hours(now, newest))))
    return np.concatenate((logs, np.stack((np.sin(angle), np.cos(angle)))))


def _short_history(past: _Past, buckets: I32, now: I64) -> tuple[I32, I32, U8, F32]:
    """The newest rows of each history as [r, SHORT_HISTORY] columns (bucket, category, type, age), newest first.

    Empty places are -1, type and age 0.
    """
    at = past.ends[:, None] - 1 - np.arange(SHORT_HISTORY)
    empty = at < past.starts[:, None]
    if not len(past.ts):
        blank = np.full(at.shape, -1, np.int32)
        return blank, blank, np.zeros(at.shape, np.uint8), np.zeros(at.shape, np.float32)
    at[empty] = 0
    bucket, category, types = buckets[past.rows[at]], past.category[at], past.types[at]
    bucket[empty], category[empty], types[empty] = -1, -1, 0
    ages = np.log1p(np.maximum(now[:, None] - past.ts[at], 0) / _HOUR_MS).astype(np.float32)
    ages[empty] = 0.0
    return bucket, category, types, ages

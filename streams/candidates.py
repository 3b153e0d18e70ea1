"""Candidates as columns: the pairs of many users at once, without repeats, and the numbers that P(asked) is told of each.

In: histories end to end (`Past`) and what each source named (`Named`). Out: `Candidates`. Pure array functions: no state, no
clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.inference import SOURCES
from streams.asked import PAIR_FEATURES
from streams.pairs import U64
from streams.sources import F32, F64, HOUR_MS, I32, I64, Index

U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

REACTIVE, REVISIT, COVISIT, POPULAR, CATEGORY, SIMILAR = (np.uint8(1 << code) for code in range(len(SOURCES)))
"""One bit a source: bit i is `SOURCES[i]`."""

DAY_MS = 24 * HOUR_MS
_RECENCY_MS = np.array([1.0, 8.0, 48.0]) * HOUR_MS

_FLAGS = np.array([[mask >> code & 1 for code in range(len(SOURCES))] for mask in range(1 << len(SOURCES))], np.float32)
_FLAGS = np.concatenate((_FLAGS, _FLAGS.sum(1, keepdims=True)), axis=1)
_COLUMN = {name: column for column, name in enumerate(PAIR_FEATURES)}
assert PAIR_FEATURES[len(SOURCES)] == "sources", "the flags and their sum are the first columns"


@dataclass(frozen=True, slots=True)
class Candidates:
    """n distinct pairs of r users, ascending by (owner, slot): `owner` int64, `slot` int32, `key` uint64, `sources` uint8
    (bits).

    `pair` float32 [n, PAIR_FEATURES], `user` float32 [r, USER_FEATURES]; an item's features lie in the item table by slot.
    """

    owner: I64
    slot: I32
    key: U64
    sources: U8
    pair: F32
    user: F32

    def __len__(self) -> int:
        return len(self.owner)


@dataclass(frozen=True, slots=True)
class Past:
    """Histories of r users end to end, newest last: user i's rows are [starts[i], ends[i])."""

    slot: I32
    ts: I64
    offset: I64
    owner: I64
    starts: I64
    ends: I64


@dataclass(frozen=True, slots=True)
class Named:
    """Pairs that one source named: `bits` is its bit (one for all, or one a pair); `score` goes into the column `column`."""

    owner: I64
    slot: I32
    bits: np.uint8 | U8
    column: str = ""
    score: F32 | None = None


def distinct(named: Sequence[Named]) -> tuple[I64, I32, U8, I64]:
    """Owner, slot and joined bits of each distinct pair with a source, and for each named pair in turn its position (-1: no
    source).
    """
    keys = np.concatenate([part.owner << 32 | part.slot for part in named])
    bits = np.concatenate([np.broadcast_to(np.asarray(part.bits, np.uint8), len(part.owner)) for part in named])
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    starts = np.flatnonzero(first)
    joined = np.bitwise_or.reduceat(bits[order], starts) if len(starts) else np.zeros(0, np.uint8)
    kept = joined > 0
    position = np.where(kept, np.cumsum(kept) - 1, -1)
    group = np.empty(len(keys), np.int64)
    group[order] = np.repeat(position, np.diff(np.append(starts, len(keys))))
    pairs = ordered[starts[kept]]
    return pairs >> 32, (pairs & 0xFFFFFFFF).astype(np.int32), joined[kept], group


def anchors(past: Past, users: I64, count: int) -> tuple[I64, I32]:
    """(owner, slot) of the newest `count` rows of each of these users' histories."""
    at = past.ends[users, None] - 1 - np.arange(count)
    there = at >= past.starts[users, None]
    return np.broadcast_to(users[:, None], at.shape)[there], past.slot[at[there]]


def near(owner: I64, neighbors: I32, scores: F32, bit: np.uint8, column: str) -> Named:
    """Neighbours [m, k] of anchors that belong to `owner` [m]; -1 is none."""
    there = neighbors >= 0
    return Named(np.broadcast_to(owner[:, None], neighbors.shape)[there], neighbors[there], bit, column, scores[there])


def spans(starts: I64, ends: I64) -> tuple[I64, I64]:
    """All positions of the ranges [starts[i], ends[i]): which range each belongs to, and the position."""
    lengths = ends - starts
    which = np.repeat(np.arange(len(starts)), lengths)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + starts[which]


def top_categories(past: Past, category: I32, users: I64, count: int, now: int) -> tuple[I64, I32]:
    """(owner, category): for each of these users the `count` heaviest known categories of the history, recent rows weighing
    more.
    """
    owner, label, weight, _ = _category_weights(past, category, now)
    wanted = np.zeros(len(past.starts), np.bool_)
    wanted[users] = True
    mine = np.flatnonzero(wanted[owner])
    mine = mine[np.lexsort((label[mine], -weight[mine], owner[mine]))]
    best = mine[rank_in_group(owner[mine]) < count]
    return owner[best], label[best].astype(np.int32)


def fill_sources(pair: F32, sources: U8, named: Sequence[Named], group: I64) -> None:
    """Flags, their sum, and each source's best score."""
    pair[:, : _FLAGS.shape[1]] = _FLAGS[sources]
    start = 0
    for part in named:
        end = start + len(part.owner)
        if part.score is not None:
            np.maximum.at(pair[:, _COLUMN[part.column]], group[start:end], part.score)
        start = end


def fill_recency(pair: F32, name: str, group: I64, ts: I64, now: int) -> None:
    """The four columns of one history whose rows, newest last, belong to pairs `group`."""
    there = group >= 0
    count = np.bincount(group[there], minlength=len(pair))
    last = np.zeros(len(pair), np.int64)
    last[group[there]] = ts[there]  # ascending in each history, so the newest stays
    known = np.flatnonzero(count)
    fill_decays(pair, name, known, last[known], count[known], now)


def fill_decays(pair: F32, name: str, rows: I64, last: I64, count: npt.NDArray[np.generic], now: int) -> None:
    """`name`_1h, _8h, _48h, _log of these rows: exp(-age / hours) of `last`, log1p of `count`."""
    first = _COLUMN[f"{name}_1h"]
    age = np.maximum(now - last, 0)[:, None]
    pair[rows, first : first + 3] = np.exp((age / -_RECENCY_MS).astype(np.float32))
    pair[rows, first + 3] = np.log1p(count.astype(np.float32))


def fill_category(pair: F32, past: Past, category: I32, owner: I64, slot: I32, now: int) -> None:
    """The share of the owner's history, recent rows weighing more, that is in the pair's category."""
    known_owner, label, weight, total = _category_weights(past, category, now)
    if not len(known_owner):
        return
    keys, sought = known_owner << 32 | label, owner << 32 | category[slot]
    at = np.minimum(keys.searchsorted(sought), len(keys) - 1)
    mine = keys[at] == sought  # an owner without history has no total to divide by
    pair[mine, _COLUMN["category_share"]] = weight[at[mine]] / total[owner[mine]]


def rank_in_group(groups: Index) -> I64:
    """Position of each element within its run of equal groups."""
    if not len(groups):
        return np.zeros(0, np.int64)
    first = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    return np.arange(len(groups)) - np.repeat(first, np.diff(np.append(first, len(groups))))


def _category_weights(past: Past, category: I32, now: int) -> tuple[I64, I64, F64, F64]:
    """Distinct (owner, known category) ascending with their decayed weight, and each owner's total over all rows."""
    label = category[past.slot]
    weight = np.exp(np.maximum(now - past.ts, 0) / -DAY_MS) + 1e-9  # an old history still has its shares
    total: F64 = np.bincount(past.owner, weight, len(past.starts)).astype(np.float64)
    known = label > 0
    keys, at = np.unique(past.owner[known] << 32 | label[known], return_inverse=True)
    return keys >> 32, keys & 0xFFFFFFFF, np.bincount(at, weight[known], len(keys)).astype(np.float64), total

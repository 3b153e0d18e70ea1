"""Which pairs may be asked for soon: candidates of the users that just did something, with everything that P(asked) looks at.

In: per user the two histories, whether a full prediction is due, and pairs that were ranked and missed (*reactive*); the
partition's item table, co-visits and similar items. Out: one row a distinct pair with its sources and feature columns. Never:
judges a pair; that is for P(asked) and verify.

Sources: reactive (ranked without an exact vector: the baseline), revisit (in the history or lately shown), covisit (touched by
others next to the user's recent items), popular, category (popular in the user's recent categories), similar (near recent items
in the ranker's space). All users of a batch are worked on at once, as concatenated columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.inference import SOURCES
from streams.asked import PAIR_FEATURES
from streams.candidates import (
    CATEGORY,
    COVISIT,
    DAY_MS,
    POPULAR,
    REACTIVE,
    REVISIT,
    SIMILAR,
    Candidates,
    Mask,
    Named,
    Past,
    anchors,
    distinct,
    fill_category,
    fill_decays,
    fill_recency,
    fill_sources,
    near,
    spans,
    top_categories,
)
from streams.covisit import Covisits
from streams.history import HistoryRow
from streams.pairs import U64, PairTable, pair_keys
from streams.similar import Similar
from streams.sources import F32, HOUR_MS, I32, I64, ItemTable, ItemVectors


@dataclass(frozen=True)
class PredictConfig:
    """Which sources there are, how many candidates each may bring, and how much is remembered per partition."""

    sources: tuple[str, ...] = SOURCES
    """("reactive",) alone is the baseline."""
    user_gap_ms: int = 60_000
    """No full prediction for a user more often than this."""
    popular_max: int = 128
    category_max: int = 32
    """Popular items taken from one category."""
    categories_max: int = 5
    covisit_anchors: int = 6
    """Newest history rows whose neighbours are candidates."""
    covisit_neighbors_max: int = 12
    covisit_reach: int = 3
    """How many rows before an event it is a neighbour of."""
    similar_anchors: int = 3
    similar_neighbors_max: int = 12
    similar_exact_items_max: int = 4096
    """Up to so many items the search for similar ones is exact."""
    similar_rebuild_items: int = 512
    items_max: int = 200_000
    users_max: int = 200_000
    asked_rows_max: int = 1_000_000
    """Pairs whose demand is remembered."""
    samples_max: int = 50_000
    sample_rate: float = 0.05
    """Share of considered pairs whose outcome is waited for; falls by halves when `samples_max` is reached."""
    label_grace_ms: int = 5 * 60_000
    half_life_labels: float = 50_000.0

    def __post_init__(self) -> None:
        unknown = set(self.sources) - set(SOURCES)
        if unknown:
            raise ValueError(f"sources: {sorted(unknown)} is unknown; there are {', '.join(SOURCES)}")
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate is {self.sample_rate}; it is a share above 0 and at most 1")
        for name in ("items_max", "users_max", "asked_rows_max", "samples_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")


class Predictor:
    """The candidate sources of one partition and what they have learned."""

    def __init__(self, config: PredictConfig, table: ItemTable, ranker: ItemVectors, seed: int) -> None:
        self.config, self.table = config, table
        self.covisits = Covisits(config.covisit_neighbors_max)
        self.similar = Similar(
            ranker,
            table,
            config.similar_neighbors_max,
            config.similar_exact_items_max,
            config.similar_rebuild_items,
            seed,
        )
        self.users = PairTable(
            "users", config.users_max, {"predicted": "<i8", "learned": "<i8", "asks": "<f8", "asks_ms": "<i8"}
        )
        self.asked = PairTable("demand", config.asked_rows_max, {"ts": "<i8", "count": "<f8"})

    def has(self, source: str) -> bool:
        """Whether the source is switched on."""
        return source in self.config.sources

    def begin(self, now: int) -> None:
        """Between batches: sweep what is full, refresh lists and indices that are due."""
        moved = self.table.sweep()
        if moved is not None:
            self.covisits.remap(moved)
            self.similar.reset()
        self.table.refresh_if_due(now)
        if self.has("similar"):
            self.similar.refresh_if_due()

    def due(self, user_hash: U64, now: int) -> Mask:
        """Which users get a full prediction now: not within `user_gap_ms` of their last; marks those that do."""
        rows = self.users.rows(user_hash, now)
        predicted = self.users.columns["predicted"]
        due: Mask = (rows >= 0) & ((predicted[rows] == 0) | (now - predicted[rows] >= self.config.user_gap_ms))
        predicted[rows[due]] = now
        return due

    def demand(self, user_hash: U64, owner: I64, slots: I32, ts: I64) -> U64:
        """Pairs that were ranked, `owner[i]`'s item `slots[i]` at `ts[i]`; returns their keys."""
        self.table.demand(slots, ts)
        keys = pair_keys(user_hash[owner], self.table.hash[slots])
        now = int(ts.max())
        rows = self.asked.rows(keys, now)
        _count_decayed(self.asked.columns["count"], self.asked.columns["ts"], rows, ts)
        users = self.users.rows(user_hash, now)[owner]
        _count_decayed(self.users.columns["asks"], self.users.columns["asks_ms"], users, ts)
        return keys

    def join(self, histories: Sequence[HistoryRow], now: int) -> Past:
        """Histories end to end, their items as slots."""
        lengths = np.fromiter((len(row.items) for row in histories), np.int64, len(histories))
        ends = np.cumsum(lengths)
        slots = self.table.intern(list(chain.from_iterable(row.items for row in histories)), now)
        ts, offsets = (
            np.concatenate([getattr(row, name) for row in histories]) if histories else np.zeros(0, np.int64)
            for name in ("ts", "offsets")
        )
        return Past(slots, ts, offsets, np.repeat(np.arange(len(histories)), lengths), ends - lengths, ends)

    def learn(self, past: Past, user_hash: U64, floor: int) -> None:
        """Co-visits of the history rows that are new since the user's last time; rows below offset `floor` were never ours."""
        rows = self.users.find(user_hash)
        learned = np.where(rows >= 0, self.users.columns["learned"][rows], 0)
        new = np.flatnonzero(past.offset >= np.maximum(learned, floor)[past.owner])
        pairs = []
        for step in range(1, self.config.covisit_reach + 1):
            right = new[new - step >= past.starts[past.owner[new]]]
            right = right[past.ts[right] - past.ts[right - step] < DAY_MS]
            pairs.append((right, right - step, np.full(len(right), 1.0 / step, np.float32)))
        right, left, amount = (np.concatenate(column) for column in zip(*pairs, strict=True))
        if len(right):
            a, b, ts = past.slot[left], past.slot[right], past.ts[right]
            self.covisits.learn(np.append(a, b), np.append(b, a), np.append(ts, ts), np.append(amount, amount))
        highest = np.maximum.reduceat(np.append(past.offset, -1), np.minimum(past.starts, len(past.offset)))
        known = (rows >= 0) & (past.ends > past.starts)
        self.users.columns["learned"][rows[known]] = np.maximum(learned, highest + 1)[known]

    def candidates(
        self, user_hash: U64, past: Past, shown: Past, full: Mask, missed: tuple[I64, I32], now: int
    ) -> Candidates:
        """All candidates of r users; `full` bool [r] says who gets the speculative sources; `missed`: (owner, slot) ranked in
        vain.
        """
        named = [self._named(past, full), self._named(shown, full)]
        if self.has("reactive"):
            named.append(Named(*missed, REACTIVE))
        named.extend(self._speculative(past, np.flatnonzero(full), now))
        owner, slot, sources, group = distinct(named)
        key = pair_keys(user_hash[owner], self.table.hash[slot])
        pair = np.zeros((len(owner), len(PAIR_FEATURES)), np.float32)
        fill_sources(pair, sources, named, group)
        fill_recency(pair, "touched", group[: len(past.slot)], past.ts, now)
        fill_recency(pair, "shown", group[len(past.slot) :][: len(shown.slot)], shown.ts, now)
        rows = self.asked.find(key)
        known = np.flatnonzero(rows >= 0)
        asked = self.asked.columns
        rows = rows[known]
        count = asked["count"][rows] * np.exp(np.minimum(asked["ts"][rows] - now, 0) / DAY_MS)
        fill_decays(pair, "asked", known, asked["ts"][rows], count, now)
        fill_category(pair, past, self.table.category, owner, slot, now)
        return Candidates(owner, slot, key, sources, pair, self._user_columns(user_hash, past, now))

    def _named(self, past: Past, full: Mask) -> Named:
        """Rows of a history: revisits of the users that are due; of the others they only carry features."""
        return Named(past.owner, past.slot, np.where(full[past.owner] & self.has("revisit"), REVISIT, np.uint8(0)))

    def _speculative(self, past: Past, full: I64, now: int) -> list[Named]:
        """What the sources name for the users `full`."""
        config, table = self.config, self.table
        found = []
        if self.has("covisit"):
            owner, slot = anchors(past, full, config.covisit_anchors)
            found.append(near(owner, *self.covisits.read(slot), COVISIT, "covisit"))
        if self.has("similar"):
            owner, slot = anchors(past, full, config.similar_anchors)
            found.append(near(owner, *self.similar.read(slot), SIMILAR, "similar"))
        if self.has("popular"):
            owner, slot = np.repeat(full, len(table.popular)), np.tile(table.popular, len(full))
            found.append(Named(owner, slot, POPULAR))
        if self.has("category"):
            owner, category = top_categories(past, table.category, full, config.categories_max, now)
            starts, ends = table.in_category(category)
            which, at = spans(starts, ends)
            found.append(Named(owner[which], table.listed[at], CATEGORY))
        return found

    def _user_columns(self, user_hash: U64, past: Past, now: int) -> F32:
        """float32 [r, USER_FEATURES]."""
        rows = self.users.find(user_hash)
        users = self.users.columns
        asks = np.where(
            rows >= 0, users["asks"][rows] * np.exp(np.minimum(0, users["asks_ms"][rows] - now) / DAY_MS), 0.0
        )
        active = np.bincount(past.owner[past.ts > now - DAY_MS], minlength=len(user_hash))
        newest = np.append(past.ts, 0)[np.where(past.ends > past.starts, past.ends - 1, len(past.ts))]
        idle = np.maximum(0, now - newest) / HOUR_MS
        angle = np.full(len(user_hash), 2.0 * np.pi * (now % DAY_MS) / DAY_MS)
        columns = (
            np.ones(len(user_hash)), np.log1p(asks), np.log1p(active), np.exp(-idle), np.exp(-idle / 24.0),
            np.sin(angle), np.cos(angle),
        )  # fmt: skip
        return np.stack(columns, axis=1).astype(np.float32)


def _count_decayed(counts: npt.NDArray[Any], newest: I64, rows: I64, ts: I64) -> None:
    """Add one to the count of each row (-1: none) after decaying it over a day from its newest time to its new one."""
    rows, ts = rows[rows >= 0], ts[rows >= 0]
    touched = np.unique(rows)
    old = newest[touched]
    np.maximum.at(newest, rows, ts)
    counts[touched] *= np.exp((old - newest[touched]) / DAY_MS)
    np.add.at(counts, rows, np.exp((ts - newest[rows]) / DAY_MS))

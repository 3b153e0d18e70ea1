"""Made-up columns for the models' tests: seeded, small, with every kind of gap a log has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.features import DENSE, SHORT_HISTORY, Features, Vectors
from models.rows import FmRows
from schemas.inference import FmRequest

NOW = 1_767_225_600_000


def features_of(seed: int, counts: Sequence[int], d: int = 8, content_dims: int = 4) -> tuple[Features, Vectors]:
    """Features and vectors of requests with `counts` pairs; about half of everything that may be missing is."""
    g = np.random.default_rng(seed)
    r, n = len(counts), sum(counts)
    history = g.integers(0, 100_000, (r, SHORT_HISTORY)).astype(np.int32)
    history[np.arange(SHORT_HISTORY) >= g.integers(0, SHORT_HISTORY + 1, r)[:, None]] = -1
    empty = history < 0
    features = Features(
        request=np.repeat(np.arange(r, dtype=np.int32), counts),
        item_bucket=g.integers(0, 1 << 17, n).astype(np.int32),
        category=g.integers(0, 1024, n).astype(np.int32),
        content=g.standard_normal((n, content_dims)).astype(np.float32),
        dense=(3 * g.standard_normal((n, len(DENSE)))).astype(np.float32),
        user_bucket=g.integers(0, 1 << 31, r).astype(np.int32),
        history_bucket=history,
        history_category=np.where(empty, -1, history % 900).astype(np.int32),
        history_type=np.where(empty, 0, history % 200).astype(np.uint8),
        history_age=np.where(empty, 0, history % 7).astype(np.float32),
    )

    def ages(m: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.where(g.random(m) < 0.5, -1, g.integers(0, 10**8, m))

    def normal(m: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        return g.standard_normal((m, d)).astype(np.float32)

    return features, Vectors(normal(n), ages(n), normal(r), ages(r), normal(r), ages(r))


class Items:
    """A small item index, as `models.engine.ItemLookup` wants it."""

    def __init__(self, content_dims: int = 4, rows: int = 4000) -> None:
        g = np.random.default_rng(5)
        self.known: dict[str, int] = {}
        self.bucket = g.integers(0, 1 << 17, rows).astype(np.int32)
        self.category = g.integers(0, 1024, rows).astype(np.int32)
        self.content = g.standard_normal((rows, content_dims)).astype(np.float32)

    def intern(self, names: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array([self.known.setdefault(name, len(self.known)) for name in names], np.int32)


def fm_request(space: int, seed: int, items: int, history: int) -> FmRequest:
    """A request of user `u<seed>`, its history newest last."""
    g = np.random.default_rng(seed)
    ts = np.sort(NOW - g.integers(0, 5 * 86_400_000, history))
    return FmRequest(
        f"u{seed}", space, NOW, 60_000, 7, 9,
        [f"i{x}" for x in g.choice(1500, items, replace=False)],
        np.ones(items, np.float32), np.ones(items, np.float32), np.zeros(items, np.uint8),
        [f"i{x}" for x in g.integers(0, 1500, history)], g.integers(1, 8, history).astype(np.uint8), ts,
    )  # fmt: skip


def tiny_world(
    seed: int, users: int = 250, items: int = 120, requests: int = 24, pairs: int = 8
) -> tuple[FmRows, Features]:
    """A world where the long history is all that matters: a user likes one of six hidden groups of items, and its history's oldest
    rows tell which; the newest SHORT_HISTORY rows, which are all that a ranker sees, are noise. Users are told apart by nothing
    else: each request comes from a new user bucket. Rows are in time order.
    """
    g = np.random.default_rng(seed)
    r, groups = users * requests // 4, 6
    group = g.integers(0, groups, items)
    liked = g.integers(0, groups, r)
    of_group = [np.flatnonzero(group == k) for k in range(groups)]
    old = np.stack([g.choice(of_group[k], 24) for k in liked])
    noise = g.integers(0, items, (r, SHORT_HISTORY))
    history = np.concatenate((old, noise), axis=1).astype(np.int32)  # newest last
    hours = np.concatenate((np.linspace(100, 40, old.shape[1]), np.linspace(20, 6, SHORT_HISTORY)))
    shown = g.integers(0, items, (r, pairs))
    chance = 1 / (1 + np.exp(-np.where(group[shown] == liked[:, None], 1.5, -2.0)))
    n = r * pairs
    rows = FmRows(
        ts=NOW + np.arange(r, dtype=np.int64) * 60_000,
        history_item=history,
        history_type=np.full(history.shape, 3, np.uint8),
        history_age_ms=np.broadcast_to((hours * 3_600_000).astype(np.int64), history.shape).copy(),
        request=np.repeat(np.arange(r, dtype=np.int32), pairs),
        item=shown.reshape(-1).astype(np.int32),
        labels=(g.random((n, 1)) < chance.reshape(-1, 1)).astype(np.float32),
        bucket=np.arange(items, dtype=np.int32),
        category=np.zeros(items, np.int32),
        content=np.zeros((items, 0), np.float32),
        context=np.zeros((n, 0), np.float32),
    )
    newest = history[:, ::-1][:, :SHORT_HISTORY]
    features = Features(
        rows.request, rows.bucket[rows.item], rows.category[rows.item], np.zeros((n, 0), np.float32),
        np.zeros((n, len(DENSE)), np.float32), np.arange(r, dtype=np.int32),
        rows.bucket[newest], np.zeros(newest.shape, np.int32), np.full(newest.shape, 3, np.uint8),
        np.broadcast_to(np.log1p(hours[::-1][:SHORT_HISTORY]), newest.shape).astype(np.float32),
    )  # fmt: skip
    return rows, features

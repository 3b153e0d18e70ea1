"""What the serving tests share: a `Serve` over a memory store, and short ways to write events, vectors and requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.ranker import RankerLike
from schemas.events import EventBatch, type_code
from schemas.inference import Embeddings
from schemas.ranking import CheckedRequest
from streams.serve import Serve, ServeConfig
from streams.state.memory import MemoryStore
from tests.streams.fakes import FakeRanker, item_index

NOW = 1_700_000_000_000
HOUR = 3_600_000
SPACE = 77
D = 4
NAMES = [f"i{x}" for x in range(200)]


def serve(
    ranker: RankerLike | None = None, store: MemoryStore | None = None, base: RankerLike | None = None, **settings: Any
) -> Serve:
    """A partition that has nothing folded yet."""
    return Serve(
        3,
        "bundle",
        ranker or FakeRanker(),
        base,
        SPACE,
        D,
        ServeConfig(**settings),
        store or MemoryStore(),
        item_index(NAMES),
    )


def events(*rows: tuple[str, str, str, int], first: int = 0) -> EventBatch:
    """(user, item, type, ts) rows at offsets `first`, `first` + 1, ..."""
    offsets, ts = np.arange(first, first + len(rows)), np.array([row[3] for row in rows], np.int64)
    types = np.array([type_code(row[2]) for row in rows], np.uint8)
    return EventBatch(3, offsets, ts, ts, [row[0] for row in rows], [row[1] for row in rows], types)


def vectors(user: str, items: Sequence[str], as_of: int, value: int = 10, space: int = SPACE, d: int = D) -> Embeddings:
    """One message whose vectors are all `value` / 10."""
    codes = np.full((len(items), d), value, np.int8)
    return Embeddings(user, space, as_of, 0, list(items), np.full(len(items), 0.1, np.float32), codes)


def request(
    name: str, user: str, candidates: Sequence[str], ts: int = NOW, offset: int = 0, duplicates: bool = False
) -> CheckedRequest:
    """A request as the shell hands it in."""
    return CheckedRequest(name, user, list(candidates), ts, ts, None, duplicates, offset)

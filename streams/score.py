"""Score: what serve keeps in tables, and what the ranker makes of it for a batch of requests.

In: requests with at least one candidate and their `now`, the partition's store. Out: `Scored`: features, vectors by tier, scores.
Never writes, orders or answers; each stage reads in bulk for all requests and computes each request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from models.features import I32, I64, Features
from models.ranker import RankerLike
from schemas.ranking import CheckedRequest
from streams.aggregate import Aggregate
from streams.cache import Cache
from streams.counters import ItemCounters
from streams.features import build_features
from streams.history import History, HistoryRow
from streams.items import ItemIndex
from streams.lookup import MISSING, Found, Neighborhood, lookup
from streams.neighbors import Neighbors, user_vectors
from streams.state.prune import Rules
from streams.state.store import Reader


@dataclass(frozen=True, slots=True)
class Tables:
    """The folds that serving reads: of events the first three, of embeddings the last two."""

    history: History
    shown: History
    counters: ItemCounters
    cache: Cache
    aggregate: Aggregate

    def rules(self) -> Rules:
        """Which rows are live, of every table."""
        folds = (self.history, self.shown, self.counters, self.cache, self.aggregate)
        return {table: rule for fold in folds for table, rule in fold.rules().items()}


@dataclass(frozen=True, slots=True)
class Scored:
    """r requests, n pairs: what the ranker saw and said. `scores` and the base ranker's `shadow` (None = off) are float64 [n]."""

    features: Features
    found: Found
    scores: npt.NDArray[np.float64]
    shadow: npt.NDArray[np.float64] | None


class Scorer:
    """`space` is the only embedding space that is read; `base` scores the same candidates without a vector."""

    def __init__(
        self,
        tables: Tables,
        ranker: RankerLike,
        base: RankerLike | None,
        space: int,
        items: ItemIndex,
        neighbors: Neighbors,
    ) -> None:
        self._tables, self._space, self._items, self._neighbors = tables, space, items, neighbors
        self._ranker, self._base = ranker, base

    def score(self, reader: Reader, requests: Sequence[CheckedRequest], nows: Sequence[int]) -> Scored:
        """One bulk read and one pass of each stage; every request has candidates."""
        request_of = np.repeat(np.arange(len(requests), dtype=np.int32), [len(r.candidates) for r in requests])
        now = np.array(nows, np.int64)
        histories = self._tables.history.read(reader, [request.user for request in requests])
        found = self._look_up(reader, requests, request_of, now, histories)
        features = self._features(reader, requests, request_of, now, histories)
        scores = self._ranker.score(features, found.vectors)
        return Scored(features, found, scores, None if self._base is None else self._base.score(features, None))

    def popularity(self, reader: Reader, request: CheckedRequest, now: int) -> I64:
        """(impressions, positives) in 24 h of each candidate, int64 [n, 2]."""
        return self._tables.counters.read(reader, self._items.intern(request.candidates), now)

    def _look_up(
        self,
        reader: Reader,
        requests: Sequence[CheckedRequest],
        request_of: I32,
        now: I64,
        histories: Sequence[HistoryRow],
    ) -> Found:
        """Vectors of every tier. Neighbours are asked only for users without a mean of their own: to the others they add nothing
        on average (measured in a prototype), and one user in ten needs them."""
        users = [request.user for request in requests]
        means = self._tables.aggregate.mean(reader, users, self._space, now)
        pairs = self._tables.cache.read_many(reader, users, self._space)
        near = Neighborhood(np.zeros_like(means.mean), np.full(len(users), MISSING, np.int64))
        lonely = np.flatnonzero(means.count == 0)
        if len(lonely) and self._neighbors.generation is not None:
            queries = user_vectors([histories[at] for at in lonely.tolist()], self._ranker, self._items)
            said = self._neighbors.ask(queries, now[lonely])
            near.vector[lonely], near.age_ms[lonely] = said.vector, said.age_ms
        candidates = [request.candidates for request in requests]
        return lookup(candidates, request_of, now, pairs, means, near, self._tables.cache.ttl_ms)

    def _features(
        self,
        reader: Reader,
        requests: Sequence[CheckedRequest],
        request_of: I32,
        now: I64,
        histories: Sequence[HistoryRow],
    ) -> Features:
        users = [request.user for request in requests]
        rows = self._items.intern(list(chain.from_iterable(request.candidates for request in requests)))
        item_counts = self._tables.counters.read(reader, rows, now[request_of])
        user_counts = self._tables.counters.read_users(reader, users, now)
        shown = self._tables.shown.read(reader, users)
        return build_features(users, histories, shown, now, request_of, rows, self._items, item_counts, user_counts)

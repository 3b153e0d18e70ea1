"""Neighbours: what users with a similar recent history have, for a user who has no FM vector of its own.

In: a snapshot of histories and user panes, the ranker's item vectors. Out: generations, each an index over users: key = the mean of
the ranker's vectors of the newest history rows (a user without any FM vector must be able to ask), value = the user's 24 h mean FM
vector. Never a source of truth: a generation is a function of the rows at two offsets, and is thrown away and cut anew.

A generation is built in steps, so that serving goes on: `Cut` opens the snapshot; `step` reads some users at a time, on the
partition's thread (it interns items); `finish` builds the index, on any thread; `Neighbors.install` swaps it in. Up to
`exact_users_max` users the search is exact; above, hnswlib with one thread, a fixed seed and users in key order (with other
settings up to a quarter of the answers change). Item vectors follow the catalogue as it is while the cut is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import hnswlib
import numpy as np
import numpy.typing as npt

from models.features import F32, I64, SHORT_HISTORY
from models.ranker import RankerLike
from streams.aggregate import Aggregate, Means
from streams.history import History, HistoryRow
from streams.items import ItemIndex
from streams.lookup import MISSING, Neighborhood
from streams.state.store import Row, Store

Name = tuple[int, int]
"""A generation's name: next offsets of events and embeddings that its rows rest on."""

USERS_A_STEP = 256
_LENGTH_BYTES = 2


@dataclass(frozen=True, slots=True)
class NeighborsConfig:
    """`k` neighbours an answer; exact search up to `exact_users_max` users, above it an HNSW graph of these parameters."""

    k: int = 10
    exact_users_max: int = 20_000
    links: int = 16
    build_width: int = 100
    search_width: int = 64
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Generation:
    """u users in key order: `keys` float32 [u, k] of length one, `means` of their vectors; `graph` is None for exact search."""

    name: Name
    keys: F32
    means: Means
    graph: hnswlib.Index | None


class Cut:
    """A generation in the making. The snapshot is taken at once; nothing that is folded later shows."""

    def __init__(
        self,
        config: NeighborsConfig,
        store: Store,
        name: Name,
        now: int,
        history: History,
        aggregate: Aggregate,
        space: int,
    ) -> None:
        self.name = name
        self._config, self._now, self._space = config, now, space
        self._history, self._aggregate = history, aggregate
        self._panes = groupby(store.rows("user_panes"), key=lambda row: _user_part(row[0]))
        self._histories = store.rows(history.table)
        self._row: Row | None = next(self._histories, None)
        self._keys: list[F32] = []
        self._means: list[Means] = []

    def step(self, ranker: RankerLike, items: ItemIndex, users_max: int = USERS_A_STEP) -> bool:
        """Read up to `users_max` more users (a few ms for 256); False when there are none left."""
        chunk = _Chunk(self._history.table)
        for key, rows in islice(self._panes, users_max):
            chunk.put(key, list(rows), self._history_of(key))
        users = [key[_LENGTH_BYTES:].decode() for key in chunk.panes]
        if users:
            means = self._aggregate.mean(chunk, users, self._space, self._now)
            keys = user_vectors(self._history.read(chunk, users), ranker, items)
            sound = (means.count > 0) & _sound(keys) & _sound(means.mean)
            self._keys.append(keys[sound])
            self._means.append(_take(means, sound))
        return len(users) == users_max

    def finish(self) -> Generation:
        """The generation of everything that was read; builds the graph where there are many users. Any thread."""
        keys = np.concatenate(self._keys) if self._keys else np.zeros((0, 1), np.float32)
        means = _join(self._means, self._aggregate.dimensions)
        keys = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), np.float32(1e-30))
        graph = _graph(keys, self._config) if len(keys) > self._config.exact_users_max else None
        return Generation(self.name, keys, means, graph)

    def _history_of(self, key: bytes) -> bytes | None:
        """The history row of one user; both tables are in key order."""
        while self._row is not None and self._row[0] < key:
            self._row = next(self._histories, None)
        return self._row[1] if self._row is not None and self._row[0] == key else None


class Neighbors:
    """The generation in use, and answers from it. Without one every answer is none."""

    def __init__(self, config: NeighborsConfig, dimensions: int, window_ms: int) -> None:
        self.config, self.dimensions, self.window_ms = config, dimensions, window_ms
        self.generation: Generation | None = None
        self.refused = 0

    @property
    def name(self) -> Name | None:
        """Of the generation in use."""
        return self.generation.name if self.generation else None

    def install(self, generation: Generation | None) -> bool:
        """Swap a generation in; None takes the present one out. One that is torn, or older, is refused and counted."""
        if generation is not None and not self._fits(generation):
            self.refused += 1
            return False
        self.generation = generation
        return True

    def ask(self, queries: F32, now: I64) -> Neighborhood:
        """Mean vector of each query's nearest users, weighted by cosine, and its age (the same mean of their ages).

        `queries` float32 [r, k] in ranker space, `now` int64 [r]. Users whose newest vector has left the window, and
        users that point the other way (cosine ≤ 0), don't count; a query that is not finite or all zero gets no answer. Each
        query is computed alone, so its answer does not depend on its company.
        """
        vector, age = np.zeros((len(queries), self.dimensions), np.float32), np.full(len(queries), MISSING, np.int64)
        generation = self.generation
        if generation is None or not len(generation.keys):
            return Neighborhood(vector, age)
        for at in np.flatnonzero(_sound(queries)).tolist():
            query = queries[at] / np.linalg.norm(queries[at])
            users, weight = self._nearest(generation, query)
            ages = np.maximum(now[at] - generation.means.newest_ms[users], 0)
            near = (weight > 0) & (ages < self.window_ms)
            if near.any():
                weight = weight[near].astype(np.float64) / weight[near].astype(np.float64).sum()
                vector[at] = (weight[:, None] * generation.means.mean[users[near]]).sum(0)
                age[at] = int((weight * ages[near]).sum())
        return Neighborhood(vector, age)

    def _nearest(self, generation: Generation, query: F32) -> tuple[I64, F32]:
        """Up to k users and their cosines, nearest first, equal ones in key order."""
        k = min(self.config.k, len(generation.keys))
        if generation.graph is not None:
            labels, distances = generation.graph.knn_query(query[None], k=k, num_threads=1)
            users, cosine = labels[0].astype(np.int64), (1.0 - distances[0]).astype(np.float32)
        else:
            every = generation.keys @ query
            cut = np.partition(every, len(every) - k)[len(every) - k]
            users = np.flatnonzero(every >= cut)
            cosine = every[users]
        best = np.lexsort((users, -cosine))[:k]
        return users[best], cosine[best]

    def _fits(self, generation: Generation) -> bool:
        users = len(generation.keys)
        whole = users == len(generation.means.count) == len(generation.means.mean)
        graph = generation.graph is None or generation.graph.element_count == users
        older = self.generation is not None and generation.name < self.generation.name
        return whole and graph and generation.means.mean.shape[1] == self.dimensions and not older


def user_vectors(histories: Sequence[HistoryRow], ranker: RankerLike, items: ItemIndex) -> F32:
    """Mean of the ranker's item vectors over each user's newest SHORT_HISTORY rows, float32 [r, k]; zeros without history.

    One call a user: a matrix product's last bits change with its shape, and a user's key must not depend on who else was asked for.
    """
    newest = [row.items[-SHORT_HISTORY:] for row in histories]
    rows = items.intern([name for names in newest for name in names])
    means: list[F32] = []
    start = 0
    for names in newest:
        own = rows[start : start + len(names)]
        start += len(names)
        vectors = ranker.item_vectors(items.bucket[own], items.category[own], items.content[own])
        means.append(vectors.sum(0) / np.float32(max(len(own), 1)))
    return np.stack(means)


class _Chunk:
    """Some users' rows of a snapshot, readable as a store is."""

    def __init__(self, history_table: str) -> None:
        self._history_table = history_table
        self.panes: dict[bytes, list[Row]] = {}
        self._histories: dict[bytes, bytes | None] = {}

    def put(self, key: bytes, panes: list[Row], history: bytes | None) -> None:
        self.panes[key], self._histories[key] = panes, history

    def get(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        assert table == self._history_table
        return [self._histories[key] for key in keys]

    def scan(self, table: str, prefixes: Sequence[bytes]) -> list[list[Row]]:
        assert table == "user_panes"
        return [[row for row in self.panes[_user_part(prefix)] if row[0].startswith(prefix)] for prefix in prefixes]


def _user_part(key: bytes) -> bytes:
    return key[: _LENGTH_BYTES + int.from_bytes(key[:_LENGTH_BYTES])]


def _sound(rows: F32) -> npt.NDArray[np.bool_]:
    """Rows that are finite and not all zero: anything else would poison an index."""
    return np.asarray(np.isfinite(rows).all(axis=1) & rows.any(axis=1))


def _take(means: Means, chosen: npt.NDArray[np.bool_]) -> Means:
    return Means(means.mean[chosen], means.count[chosen], means.newest_ms[chosen])


def _join(parts: Sequence[Means], dimensions: int) -> Means:
    if not parts:
        return Means(np.zeros((0, dimensions), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    return Means(
        np.concatenate([part.mean for part in parts]),
        np.concatenate([part.count for part in parts]),
        np.concatenate([part.newest_ms for part in parts]),
    )


def _graph(keys: F32, config: NeighborsConfig) -> hnswlib.Index:
    graph = hnswlib.Index(space="ip", dim=keys.shape[1])
    graph.init_index(len(keys), M=config.links, ef_construction=config.build_width, random_seed=config.seed)
    graph.add_items(keys, np.arange(len(keys)), num_threads=1)
    graph.set_ef(max(config.search_width, config.k))
    return graph

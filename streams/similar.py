"""Items near an item in the ranker's own space: one of the sources of candidates.

In: the item table and a ranker. Out: per slot its nearest slots and their cosines. Never: an authority, nor updated in place:
an index only takes new items, and a new generation answers once `rebuild_items` new ones (or a tenth) have come.

Below `exact_items_max` items the search is exact, above by hnswlib: cosine, one thread, a fixed seed, so it repeats.
"""

from __future__ import annotations

import hnswlib
import numpy as np

from streams.sources import F32, I32, I64, Index, ItemTable, ItemVectors

_CHUNK = 256
_EF = 48
_GROWTH = 0.1


class Similar:
    """Nearest items by slot; answers are kept until the next generation."""

    def __init__(
        self,
        ranker: ItemVectors,
        table: ItemTable,
        neighbors_max: int,
        exact_items_max: int,
        rebuild_items: int,
        seed: int,
    ) -> None:
        self._ranker, self._table = ranker, table
        self.neighbors_max, self.exact_items_max, self.rebuild_items = neighbors_max, exact_items_max, rebuild_items
        self._seed = seed
        self.generation = 0
        self._vectors = np.zeros((0, 0), np.float32)
        self._usable = np.zeros(0, np.int64)  # slots with a finite vector that is not zero, ascending
        self._index: hnswlib.Index | None = None
        self._clear_answers(0)

    @property
    def items(self) -> int:
        """Items in the present generation."""
        return len(self._vectors)

    def refresh_if_due(self) -> bool:
        """A new generation when enough items are new."""
        new = len(self._table) - self.items
        if new < max(1 if not self.items else self.rebuild_items, int(self.items * _GROWTH)):
            return False
        self._extend(np.arange(self.items, len(self._table)))
        return True

    def restore(self, items: int) -> None:
        """Be at the generation that held so many items: the same vectors, entered in the same order."""
        if items:
            self._extend(np.arange(items))

    def reset(self) -> None:
        """Forget all vectors: slots were renumbered, or the ranker changed."""
        self._vectors = np.zeros((0, 0), np.float32)
        self._usable, self._index = np.zeros(0, np.int64), None
        self._clear_answers(0)

    def read(self, slots: Index) -> tuple[I32, F32]:
        """Nearest slots int32 [n, neighbors_max] (-1 = none) and their cosines float32, best first, the slot itself left out."""
        answers = (
            np.full((len(slots), self.neighbors_max), -1, np.int32),
            np.zeros((len(slots), self.neighbors_max), np.float32),
        )
        known = np.flatnonzero(slots < self.items)
        wanted = np.unique(slots[known])
        missing = wanted[self._answered[wanted] != self.generation]
        if len(missing):
            self._neighbors[missing], self._cosines[missing] = self._search(missing)
            self._answered[missing] = self.generation
        answers[0][known], answers[1][known] = self._neighbors[slots[known]], self._cosines[slots[known]]
        return answers

    def _extend(self, slots: I64) -> None:
        rows, items = self._table.rows(slots), self._table.items
        vectors = self._ranker.item_vectors(items.bucket[rows], items.category[rows], items.content[rows])
        norms = np.linalg.norm(vectors, axis=1)
        good = np.isfinite(norms) & (norms > 1e-12)
        vectors = np.where(good[:, None], vectors / np.where(good, norms, 1.0)[:, None], 0.0).astype(np.float32)
        self._vectors = np.concatenate((self._vectors.reshape(-1, vectors.shape[1]), vectors))
        self._usable = np.concatenate((self._usable, slots[good]))
        if len(self._usable) > self.exact_items_max:
            self._index_new(slots[good])
        self._clear_answers(len(self._vectors))
        self.generation += 1

    def _index_new(self, new: I64) -> None:
        if self._index is None:
            new = self._usable
            self._index = hnswlib.Index(space="cosine", dim=self._vectors.shape[1])
            self._index.init_index(max_elements=2 * len(new), ef_construction=80, M=12, random_seed=self._seed)
            self._index.set_ef(_EF)
        elif len(self._usable) > self._index.get_max_elements():
            self._index.resize_index(2 * len(self._usable))
        self._index.add_items(self._vectors[new], new, num_threads=1)

    def _search(self, slots: I64 | I32) -> tuple[I32, F32]:
        found = np.full((len(slots), self.neighbors_max), -1, np.int32)
        cosines = np.zeros((len(slots), self.neighbors_max), np.float32)
        k = min(self.neighbors_max + 1, len(self._usable))
        usable = np.flatnonzero(self._vectors[slots].any(axis=1))
        if k < 2 or not len(usable):
            return found, cosines
        for start in range(0, len(usable), _CHUNK):
            part = usable[start : start + _CHUNK]
            labels, near = self._nearest(slots[part], k)
            mine = labels == slots[part][:, None]
            near[mine] = -np.inf  # to the end
            order = np.argsort(-near, axis=1, kind="stable")[:, : k - 1]
            labels, near = np.take_along_axis(labels, order, 1), np.take_along_axis(near, order, 1)
            found[part, : k - 1] = np.where(np.isfinite(near), labels, -1)
            cosines[part, : k - 1] = np.where(np.isfinite(near), near, 0.0)
        return found, cosines

    def _nearest(self, slots: Index, k: int) -> tuple[I64, F32]:
        if self._index is not None:
            labels, distances = self._index.knn_query(self._vectors[slots], k, num_threads=1)
            return labels.astype(np.int64), (1.0 - distances).astype(np.float32)
        # not a matrix product: its last bits change with who else is asked for, and a restart asks for others together
        cosines = np.einsum("ik,jk->ij", self._vectors[slots], self._vectors[self._usable])
        columns = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
        return self._usable[columns], np.take_along_axis(cosines, columns, 1)

    def _clear_answers(self, rows: int) -> None:
        self._neighbors = np.full((rows, self.neighbors_max), -1, np.int32)
        self._cosines = np.zeros((rows, self.neighbors_max), np.float32)
        self._answered = np.full(rows, -1, np.int64)

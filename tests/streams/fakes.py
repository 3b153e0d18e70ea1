"""Small stand-ins for the serving tests: items with features, a ranker that is plain arithmetic, an engine that can fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from models.features import F32, I32, Features, Vectors, no_vectors
from schemas.errors import BadRecord
from schemas.events import Item
from schemas.inference import Embeddings, FmRequest
from schemas.keys import hash64
from streams.items import ItemIndex

CONTENT = 4


def item_index(names: Sequence[str]) -> ItemIndex:
    """An index that knows these items: category and content are functions of the id, one in seven has none."""
    items = ItemIndex(item_buckets=1000, category_buckets=7, content_dims=CONTENT)
    for name in names:
        number = hash64(name)
        content = np.random.default_rng(number).normal(size=CONTENT).tolist() if number % 5 else None
        items.update([(name, Item(name, f"c{number % 6}" if number % 7 else None, content))])
    return items


class FakeRanker:
    """Scores by arithmetic on buckets, dense features and vectors; `broken` maps an item bucket to the score it gets."""

    def __init__(self, broken: dict[int, float] | None = None, constant: float | None = None) -> None:
        self.broken = broken or {}
        self.constant = constant
        self.calls = 0

    def score_many(self, features: Features, vectors: Vectors | None = None) -> npt.NDArray[np.float64]:
        return self.score(features, vectors)

    def score(self, features: Features, vectors: Vectors | None = None) -> npt.NDArray[np.float64]:
        self.calls += 1
        vectors = vectors or no_vectors(len(features.request), len(features.user_bucket), 4)
        if self.constant is not None:
            return np.full(len(features.request), self.constant)
        logits = (features.item_bucket % 97) / 97.0 - 0.5 + 0.01 * features.dense.astype(np.float64).sum(1)
        logits = logits + 0.1 * vectors.exact.astype(np.float64).sum(1)
        logits += 0.1 * (vectors.user + vectors.neighbor).astype(np.float64).sum(1)[features.request]
        scores: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(-logits))
        for bucket, score in self.broken.items():
            scores[features.item_bucket == bucket] = score
        return scores

    def item_vectors(self, bucket: I32, category: I32, content: F32) -> F32:
        vectors = np.empty((len(bucket), 3), np.float32)
        vectors[:, 0] = bucket % 13 - 6.0
        vectors[:, 1] = category
        vectors[:, 2] = 1.0 + content.sum(1)
        return vectors


class FakeEngine:
    """Embeds by hash; items named `poison` raise, items named `nan` make their vector all zero."""

    def __init__(self, dimensions: int = 4) -> None:
        self.dimensions = dimensions
        self.batches: list[int] = []

    def embed(
        self, requests: Sequence[FmRequest], offsets: Sequence[int] | None = None
    ) -> list[Embeddings | BadRecord]:
        self.batches.append(len(requests))
        if any("poison" in request.items for request in requests):
            raise ValueError("the model refuses this item")
        return [self._one(*one) for one in zip(requests, offsets or [-1] * len(requests), strict=True)]

    def _one(self, request: FmRequest, offset: int) -> Embeddings | BadRecord:
        if "unfit" in request.items:
            return BadRecord("length", "the model says so")
        rows = [np.random.default_rng(hash64(name)).integers(1, 100, self.dimensions) for name in request.items]
        codes = np.array(rows, np.int8).reshape(-1, self.dimensions)
        codes[[name == "nan" for name in request.items]] = 0
        scales = np.full(len(codes), 0.01, np.float32)
        return Embeddings(request.user, request.space, request.as_of, offset, request.items, scales, codes)

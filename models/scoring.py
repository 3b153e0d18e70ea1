"""The ranker's network for one request, in numpy at one fixed shape: microseconds instead of torch's milliseconds.

In: a trained ranker's tensors, then requests. Out: probabilities. A request is computed alone and padded to ROWS rows, so that its
bytes don't depend on what came with it; every product keeps its order of summation whatever the number of BLAS threads (a test
holds both). Another CPU may round otherwise. `models.ranker.RankerNet` is the definition; this agrees with it within 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from models.features import DENSE, F32, I64, SHORT_HISTORY, Features, Vectors

if TYPE_CHECKING:
    from models.ranker import RankerConfig

F64 = npt.NDArray[np.float64]

ROWS = 128
"""Candidates a call; a request with fewer is padded, one with more takes several calls."""

ATTENTION_MAX = 20.0
"""Attention logits are cut here, so that exp stays finite in float32."""

EMPTY = -1e4
"""Attention logit of an empty history row: exp makes it zero."""

HOUR_MS = 3_600_000.0


class Scorer:
    """Weights laid out for one product a layer; the dense features' standardisation is folded into the first."""

    def __init__(self, config: RankerConfig, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        self._config = config
        w = {name: np.asarray(value, np.float32) for name, value in state.items()}
        self._items, self._categories, self._users = w["item_table"], w["category_table"], w["user_table"]
        self._content = np.ascontiguousarray(w["content.weight"].T) if config.content_dims else None
        self._query = np.ascontiguousarray(w["query.weight"].T)  # [2e, k]
        self._type_bias, self._age_weight = w["type_bias"], w["age_weight"][0]
        # request inputs → first layer's share, then cross_rank vectors in item space
        self._request = np.ascontiguousarray(np.concatenate((w["request.weight"], w["cross.weight"])).T)
        pair = w["pair.weight"].T.astype(np.float64)
        at = slice(config.item_dims, config.item_dims + len(DENSE))
        bias = w["pair.bias"] - (w["dense_mean"] / w["dense_std"]).astype(np.float64) @ pair[at]
        pair[at] /= w["dense_std"][:, None]
        self._pair = pair.astype(np.float32)  # [pair_inputs, hidden + 2]
        self._bias = np.concatenate((bias, w["cross.bias"])).astype(np.float32)
        self._second, self._second_bias = np.ascontiguousarray(w["second.weight"].T), w["second.bias"]
        width = config.head_hidden
        self._heads = np.zeros((2 * width, 2), np.float32)
        self._heads[:width, 0], self._heads[width:, 1] = w["heads"]

    def score(self, features: Features, vectors: Vectors, starts: I64) -> F64:
        """float64 [n] probabilities of requests whose pairs begin at `starts` (int64 [r + 1])."""
        out = np.empty(len(features.request), np.float64)
        edges = starts.tolist()
        for request, (begin, end) in enumerate(pairwise(edges)):
            if begin == end:
                continue
            history, bias, inputs = self._history(features, vectors, request)
            folded = inputs @ self._request + self._bias
            first, cross = folded[: self._config.hidden + 2], folded[self._config.hidden + 2 :]
            against = np.concatenate((history @ self._query, cross.reshape(self._config.cross_rank, -1))).T
            for low in range(begin, end, ROWS):
                high = min(low + ROWS, end)
                out[low:high] = self._rows(features, vectors, low, high, history, bias, against, first)
        return out

    def _history(self, features: Features, vectors: Vectors, request: int) -> tuple[F32, F32, F32]:
        """One request's history rows [s, 2e], their attention bias [s], and its inputs to the first layer."""
        config, e, d = self._config, self._config.id_dims, self._config.d
        bucket = features.history_bucket[request]
        valid = bucket >= 0
        rows = np.empty((SHORT_HISTORY, 2 * e), np.float32)
        rows[:, :e] = self._items[bucket % config.item_buckets]
        rows[:, e:] = self._categories[features.history_category[request] % config.category_buckets]
        rows *= valid[:, None]
        bias = self._type_bias[features.history_type[request]] + self._age_weight * features.history_age[request]
        bias[~valid] = EMPTY
        inputs = np.zeros(config.request_inputs, np.float32)
        inputs[:e] = self._users[features.user_bucket[request] % config.user_buckets]
        inputs[e : 3 * e] = rows.sum(0) / np.float32(max(1, int(valid.sum())))
        if config.vectors:
            at = 3 * e
            for vector, age in (
                (vectors.user[request], vectors.user_age_ms[request]),
                (vectors.neighbor[request], vectors.neighbor_age_ms[request]),
            ):
                if age >= 0:
                    inputs[at : at + d], inputs[at + d], inputs[at + d + 1] = vector, 1.0, np.log1p(age / HOUR_MS)
                at += d + 2
        return rows, bias, inputs

    def _rows(
        self,
        features: Features,
        vectors: Vectors,
        low: int,
        high: int,
        history: F32,
        bias: F32,
        against: F32,
        first: F32,
    ) -> F64:
        """Probabilities of at most ROWS pairs of one request."""
        config, e, k, n = self._config, self._config.id_dims, self._config.item_dims, high - low
        inputs = np.zeros((ROWS, config.pair_inputs), np.float32)
        inputs[:n, :e] = self._items[features.item_bucket[low:high] % config.item_buckets]
        inputs[:n, e : 2 * e] = self._categories[features.category[low:high] % config.category_buckets]
        at = k + len(DENSE)
        if self._content is not None:
            content = np.zeros((ROWS, config.content_dims), np.float32)
            content[:n] = features.content[low:high]
            np.matmul(content, self._content, out=inputs[:, 2 * e : k])
        inputs[:n, k:at] = features.dense[low:high]
        dots = inputs[:, :k] @ against  # [ROWS, s + cross_rank]
        weights = dots[:, :SHORT_HISTORY] + bias
        np.minimum(weights, ATTENTION_MAX, out=weights)
        np.exp(weights, out=weights)
        total = weights.sum(1, keepdims=True)
        total += 1.0
        np.divide(weights @ history, total, out=inputs[:, at : at + 2 * e])
        at += 2 * e
        np.log(total, out=inputs[:, at : at + 1])
        inputs[:, at + 1 : at + 1 + config.cross_rank] = dots[:, SHORT_HISTORY:]
        hit = vectors.exact_age_ms[low:high] >= 0
        if config.vectors and hit.any():
            at += 1 + config.cross_rank
            age = np.log1p(np.maximum(vectors.exact_age_ms[low:high], 0) / HOUR_MS)
            inputs[:n, at : at + config.d] = np.where(hit[:, None], vectors.exact[low:high], np.float32(0))
            inputs[:n, at + config.d] = hit
            inputs[:n, at + config.d + 1] = age * hit
        hidden = inputs @ self._pair
        hidden += first
        skip = hidden[:, config.hidden :].copy()
        np.maximum(hidden, 0.0, out=hidden)
        second = hidden[:, : config.hidden] @ self._second
        second += self._second_bias
        np.maximum(second, 0.0, out=second)
        skip += second @ self._heads
        logits = np.where(hit, skip[:n, 1], skip[:n, 0]).astype(np.float64)
        return np.asarray(1.0 / (1.0 + np.exp(np.negative(logits, out=logits), out=logits)), np.float64)

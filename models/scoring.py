"""The ranker's network for one request, at one fixed shape: microseconds instead of torch's milliseconds.

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

from models import layers
from models.features import DENSE, F32, I64, SHORT_HISTORY, Features, Vectors

if TYPE_CHECKING:
    from models.ranker import RankerConfig

F64 = npt.NDArray[np.float64]

ROWS = 128
"""Candidates a call; a request with fewer is padded, one with more takes several calls."""


class Scorer:
    """Weights laid out for one product a layer; the dense features' standardisation is folded into the first."""

    def __init__(self, config: RankerConfig, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        self._config = config
        w = {name: np.asarray(value, np.float32) for name, value in state.items()}
        self._items, self._categories, self._users = w["item_table"], w["category_table"], w["user_table"]
        empty = np.zeros((0, 0), np.float32)
        self._content = np.ascontiguousarray(w["content.weight"].T) if config.content_dims else empty  # [c, e]
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
        self._heads = np.ascontiguousarray(w["heads"])  # [misses, hits]

    def score(self, features: Features, vectors: Vectors, starts: I64) -> F64:
        """float64 [n] probabilities of requests whose pairs begin at `starts` (int64 [r + 1]). ValueError for other shapes."""
        self._check(features, vectors)
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

    def _check(self, features: Features, vectors: Vectors) -> None:
        """Compiled loops look at no bounds, so what they are given must fit."""
        config = self._config
        found = (features.content.shape[1], features.dense.shape[1], vectors.exact.shape[1])
        wanted = (config.content_dims or found[0], len(DENSE), config.d)
        if found != wanted:
            raise ValueError(
                f"content, dense features and vectors have {found} numbers, the ranker reads {wanted}; all must be of one bundle"
            )

    def _history(self, features: Features, vectors: Vectors, request: int) -> tuple[F32, F32, F32]:
        """One request's history rows [s, 2e], their attention bias [s], and its inputs to the first layer."""
        config, e, d = self._config, self._config.id_dims, self._config.d
        rows, bias = np.empty((SHORT_HISTORY, 2 * e), np.float32), np.empty(SHORT_HISTORY, np.float32)
        inputs = np.zeros(config.request_inputs, np.float32)
        inputs[:e] = self._users[features.user_bucket[request] % config.user_buckets]
        layers.history_rows(
            self._items, self._categories, self._type_bias, self._age_weight, features.history_bucket[request],
            features.history_category[request], features.history_type[request], features.history_age[request],
            rows, bias, inputs[e : 3 * e],
        )  # fmt: skip
        if config.vectors:
            at = 3 * e
            for vector, age in (
                (vectors.user[request], vectors.user_age_ms[request]),
                (vectors.neighbor[request], vectors.neighbor_age_ms[request]),
            ):
                if age >= 0:
                    inputs[at : at + d], inputs[at + d] = vector, 1.0
                    inputs[at + d + 1] = np.log1p(age / layers.HOUR_MS)
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
        layers.pair_inputs(
            self._items, self._categories, self._content, features.item_bucket[low:high], features.category[low:high],
            features.content[low:high], features.dense[low:high], inputs,
        )  # fmt: skip
        dots = inputs[:, :k] @ against  # [ROWS, s + cross_rank]
        at = k + len(DENSE)
        layers.attention(n, dots, bias, history, at, inputs)
        ages = vectors.exact_age_ms[low:high]
        if config.vectors:
            layers.exact_slot(vectors.exact[low:high], ages, at + 2 * e + 1 + config.cross_rank, inputs)
        hidden, skip = np.empty((ROWS, config.hidden), np.float32), np.empty((ROWS, 2), np.float32)
        layers.first_layer(inputs @ self._pair, first, hidden, skip)
        out = np.empty(n, np.float64)
        layers.heads(hidden @ self._second, self._second_bias, self._heads, skip, ages, out)
        return out

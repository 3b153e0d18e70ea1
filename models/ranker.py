"""The ranker (VM): a small network that scores a request's candidates in microseconds, with whatever vectors the cache had.

In: `Features` of r requests with n pairs and their `Vectors`. Out: n probabilities. Ids reach it as hash buckets, vectors in three
slots (exact, user, neighbor), each with a mask and an age; pairs with an exact vector have a head of their own (two heads were
worth 6 points of transfer ratio). Never sees an id, a clock or a store, and never mixes two requests in one computation.

`RankerNet` is the definition, in torch, and what is trained; `models.scoring` is the same network in numpy at one fixed shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from models.features import DENSE, F32, I32, Features, Vectors, no_vectors, pair_starts, take_requests
from models.layers import ATTENTION_MAX, EMPTY, HOUR_MS
from models.scoring import Scorer
from models.seeded import Linear, State, generator, initialise, load_state, state_of, threads

F64 = npt.NDArray[np.float64]


_CHUNK_PAIRS = 8192  # of score_many: bounds its memory


@dataclass(frozen=True, slots=True)
class RankerConfig:
    """Shapes. Buckets of features are taken modulo the tables; `d` is the vectors' dimension; `vectors=False` reads none."""

    vectors: bool = True
    d: int = 16
    content_dims: int = 0
    item_buckets: int = 1 << 17
    category_buckets: int = 1 << 10
    user_buckets: int = 1 << 16
    id_dims: int = 8
    cross_rank: int = 6
    hidden: int = 48
    head_hidden: int = 24

    @property
    def item_dims(self) -> int:
        """Dimensions of an item in ranker space: its id, its category, its content."""
        return self.id_dims * (3 if self.content_dims else 2)

    @property
    def pair_inputs(self) -> int:
        own = self.item_dims + len(DENSE) + 2 * self.id_dims + 1 + self.cross_rank
        return own + (self.d + 2 if self.vectors else 0)

    @property
    def request_inputs(self) -> int:
        return 3 * self.id_dims + (2 * (self.d + 2) if self.vectors else 0)


class RankerLike(Protocol):
    """What a ranker of one's own must offer; shapes as in `Ranker`."""

    def score(self, features: Features, vectors: Vectors | None = None) -> F64: ...
    def score_many(self, features: Features, vectors: Vectors | None = None) -> F64: ...
    def item_vectors(self, bucket: I32, category: I32, content: F32) -> F32: ...


class RankerNet(nn.Module):
    """(features, vectors) → logits [n, 2]: column 0 for pairs without an exact vector, column 1 for those with one."""

    dense_mean: Tensor
    dense_std: Tensor

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        self.config = config
        e, k = config.id_dims, config.item_dims
        self.item_table = nn.Parameter(torch.empty(config.item_buckets, e))
        self.category_table = nn.Parameter(torch.empty(config.category_buckets, e))
        self.user_table = nn.Parameter(torch.empty(config.user_buckets, e))
        if config.content_dims:
            self.content = Linear(config.content_dims, e, bias=False)
        self.query = Linear(2 * e, k, bias=False)
        self.type_bias = nn.Parameter(torch.empty(256))
        self.age_weight = nn.Parameter(torch.empty(1))
        self.cross = Linear(config.request_inputs, config.cross_rank * k)
        self.pair = Linear(config.pair_inputs, config.hidden + 2)
        self.request = Linear(config.request_inputs, config.hidden + 2, bias=False)
        self.second = Linear(config.hidden, 2 * config.head_hidden)
        self.heads = nn.Parameter(torch.empty(2, config.head_hidden))
        self.register_buffer("dense_mean", torch.zeros(len(DENSE)))
        self.register_buffer("dense_std", torch.ones(len(DENSE)))

    def forward(self, features: Features, vectors: Vectors) -> Tensor:
        request = torch.from_numpy(features.request).long()
        items = self.items(features.item_bucket, features.category, features.content)  # [n, k]
        history, bias, mean = self._history(features)  # [r, s, 2e], [r, s], [r, 2e]
        inputs = self._request_inputs(features, vectors, mean)  # [r, request_inputs]
        cross = self.cross(inputs).view(len(inputs), self.config.cross_rank, self.config.item_dims)
        # pairs as [r, p] with padding, so that what belongs to a request is multiplied once and not gathered for every pair
        starts = torch.from_numpy(pair_starts(features))
        p = int((starts[1:] - starts[:-1]).max()) if len(inputs) else 0
        place = request * p + torch.arange(len(request)) - starts[request]
        padded = items.new_zeros(len(inputs) * p, items.shape[1]).index_copy(0, place, items).view(len(inputs), p, -1)
        logits = padded @ self.query(history).transpose(1, 2) + bias[:, None, :]  # [r, p, s]
        weights = logits.clamp(max=ATTENTION_MAX).exp()
        total = 1.0 + weights.sum(2, keepdim=True)
        met = torch.cat((weights @ history / total, total.log(), padded @ cross.transpose(1, 2)), 2)
        dense = (torch.from_numpy(features.dense) - self.dense_mean) / self.dense_std
        parts = [items, dense, met.flatten(0, 1)[place]]
        if self.config.vectors:
            parts.append(slot(vectors.exact, vectors.exact_age_ms))
        first = self.pair(torch.cat(parts, 1)) + self.request(inputs)[request]
        hidden, skip = first[:, : self.config.hidden].relu(), first[:, self.config.hidden :]
        second = self.second(hidden).relu().view(len(hidden), 2, self.config.head_hidden)
        out: Tensor = (second * self.heads).sum(2) + skip  # [n, 2]
        return out

    def items(self, bucket: I32, category: I32, content: F32) -> Tensor:
        """[n, k]: items in ranker space."""
        parts = [
            self.item_table[torch.from_numpy(bucket % self.config.item_buckets).long()],
            self.category_table[torch.from_numpy(category % self.config.category_buckets).long()],
        ]
        if self.config.content_dims:
            parts.append(self.content(torch.from_numpy(content)))
        return torch.cat(parts, 1)

    def _history(self, features: Features) -> tuple[Tensor, Tensor, Tensor]:
        valid = torch.from_numpy(features.history_bucket >= 0).float()  # [r, s]
        rows = torch.cat(
            (
                self.item_table[torch.from_numpy(features.history_bucket % self.config.item_buckets).long()],
                self.category_table[torch.from_numpy(features.history_category % self.config.category_buckets).long()],
            ),
            2,
        )
        rows = rows * valid[:, :, None]
        bias = self.type_bias[torch.from_numpy(features.history_type).long()]
        bias = bias + self.age_weight * torch.from_numpy(features.history_age)
        mean = rows.sum(1) / valid.sum(1, keepdim=True).clamp(min=1.0)
        return rows, torch.where(valid > 0, bias, torch.full_like(bias, EMPTY)), mean

    def _request_inputs(self, features: Features, vectors: Vectors, mean: Tensor) -> Tensor:
        parts = [self.user_table[torch.from_numpy(features.user_bucket % self.config.user_buckets).long()], mean]
        if self.config.vectors:
            parts.append(slot(vectors.user, vectors.user_age_ms))
            parts.append(slot(vectors.neighbor, vectors.neighbor_age_ms))
        return torch.cat(parts, 1)


def slot(vector: F32, age_ms: npt.NDArray[np.int64]) -> Tensor:
    """[m, d + 2]: the vector, its mask, log1p of its age in hours; all zero where it is missing (age -1)."""
    there = age_ms >= 0
    columns = np.empty((len(vector), vector.shape[1] + 2), np.float32)
    columns[:, :-2] = np.where(there[:, None], vector, np.float32(0))
    columns[:, -2] = there
    columns[:, -1] = np.log1p(np.maximum(age_ms, 0) / HOUR_MS) * there
    return torch.from_numpy(columns)


class Ranker:
    """A trained ranker. `score` gives a request the same bytes whatever it came with; `score_many` is for bulk."""

    def __init__(self, config: RankerConfig, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        self.config = config
        self._net = RankerNet(config)
        load_state(self._net, state, "ranker")
        self._net.requires_grad_(False)
        self._scorer = Scorer(config, self.state())

    @classmethod
    def untrained(cls, config: RankerConfig, seed: int) -> Ranker:
        """A ranker with random weights: to begin training from, and for tests."""
        net = RankerNet(config)
        initialise(net, generator(seed))
        return cls(config, state_of(net))

    def widened(self) -> Ranker:
        """The same ranker with vector slots that it does not use yet: its scores are this one's whatever the vectors.

        Where a ranker with vectors starts to be trained: it can only win over the one without. New inputs come last and weigh
        nothing; the head for exact hits starts as the head for the rest.
        """
        config = replace(self.config, vectors=True)
        state = {name: value.copy() for name, value in self.state().items()}
        for name, value in Ranker.untrained(config, 0).state().items():
            if value.shape != state[name].shape:
                state[name] = np.pad(state[name], ((0, 0), (0, value.shape[1] - state[name].shape[1])))
        return Ranker(config, state).one_headed()

    def one_headed(self) -> Ranker:
        """The same ranker with the head for exact hits replaced by the head for the rest."""
        state = {name: value.copy() for name, value in self.state().items()}
        half, rest = self.config.head_hidden, self.config.hidden
        for name in ("second.weight", "second.bias"):
            state[name][half:] = state[name][:half]
        state["heads"][1] = state["heads"][0]
        for name in ("pair.weight", "pair.bias", "request.weight"):
            state[name][rest + 1] = state[name][rest]
        return Ranker(self.config, state)

    def state(self) -> State:
        """The tensors that a bundle stores."""
        return state_of(self._net)

    def item_vectors(self, bucket: I32, category: I32, content: F32) -> F32:
        """float32 [n, k]: items in ranker space (k = `config.item_dims`), for neighbour keys and similar items."""
        with torch.inference_mode():
            return np.asarray(self._net.items(bucket, category, content).numpy(), np.float32)

    def score(self, features: Features, vectors: Vectors | None = None) -> F64:
        """float64 [n]: probabilities, each request computed alone at the padded shape of `models.scoring.ROWS` rows, one thread."""
        return self._scorer.score(features, self._vectors(features, vectors), pair_starts(features))

    def score_many(self, features: Features, vectors: Vectors | None = None) -> F64:
        """float64 [n]: the same numbers within 1e-6, all requests in one batch: not byte-stable across batches."""
        vectors, starts = self._vectors(features, vectors), pair_starts(features)
        out = np.empty(len(features.request), np.float64)
        counts = np.diff(starts)
        order = np.argsort(counts, kind="stable")
        for chosen in np.array_split(order[counts[order] > 0], max(1, len(out) // _CHUNK_PAIRS)):
            if len(chosen):
                one, had, pairs = take_requests(features, vectors, chosen, starts)
                out[pairs] = self._probabilities(one, had)
        return out

    def _vectors(self, features: Features, vectors: Vectors | None) -> Vectors:
        if vectors is None or not self.config.vectors:
            return no_vectors(len(features.request), len(features.user_bucket), self.config.d)
        return vectors

    def _probabilities(self, features: Features, vectors: Vectors) -> F64:
        with torch.inference_mode(), threads(1):
            logits = self._net(features, vectors).numpy().astype(np.float64)
        chosen = np.where(vectors.exact_age_ms >= 0, logits[:, 1], logits[:, 0])
        return np.asarray(1.0 / (1.0 + np.exp(-chosen)), np.float64)

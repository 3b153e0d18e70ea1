"""The foundation model (FM): one user's history and n items in, the last shared layer of n pairs out.

In: histories as padded columns (item bucket, category, content, type, age) and items likewise. Out: float32 [n, D], which the
compressor makes small and the ranker reads hours later. The history is encoded once for a user's n items. *Context* (the hour of
the day, fresh counters) enters only in the heads above the shared layer: a vector in the cache can't know when it will be read,
and so the vector learns what the ranker's own features don't tell. Two forms of
user-item interplay, gated pooling and target attention, meet each item bilinearly: without those terms a larger model did not
beat the ranker (MODELS). A third, tastes, pools what each row's type makes of its item (a click pulls towards it, an impression
away from it) over several learned spans of time. Never sees an id or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from models.seeded import Linear, State, generator, initialise, load_state, state_of
from schemas.events import IMPRESSION_CODE

ATTENTION_MAX = 20.0
HOUR_MS = 3_600_000.0
AGE_SCALES_HOURS = (1.0, 6.0, 24.0, 120.0)
"""A row's age reaches the model as log1p(hours) and as exp(-hours / scale) for each of these."""

ITEM_TABLES = ("item_table", "target_item_table")
"""What is known of single items: all that a refresh in the same space may learn."""

_TABLE_STD = 0.2
_ITEM_STD = 0.02
"""Of an item's own row before it is learned: an item that training has not seen is its category and its content, not noise."""

_SHOWN_SIGN = -0.25
"""Where the sign of an impression starts: a taste is then about what was liked beyond what was shown. From +1 it is not found."""

_TASTE_PRIOR = 3.0
"""Rows' worth of doubt in a taste: a mean over few rows stays small."""

_AGES = 1 + len(AGE_SCALES_HOURS)
_EMPTY = -1e4  # an attention logit that exp turns into zero


@dataclass(frozen=True, slots=True)
class FmConfig:
    """Shapes. Buckets are taken modulo the tables; `dims` (D) is the vector's length; `tasks` names the labels in order;
    `context_dims` numbers reach the heads alone (`models.features.DENSE` of the pair, in training)."""

    tasks: tuple[str, ...] = ("positive",)
    item_buckets: int = 1 << 17
    category_buckets: int = 1 << 10
    content_dims: int = 0
    context_dims: int = 0
    history_rows: int = 164
    width: int = 32
    heads: int = 2
    tastes: int = 4
    hidden: int = 128
    dims: int = 64
    head_hidden: int = 32

    @property
    def pair_inputs(self) -> int:
        return self.width * (3 + 2 * self.heads + self.tastes) + 2 * self.heads + self.tastes + 4


@dataclass(frozen=True, slots=True)
class ItemBatch:
    """Items as columns of any leading shape: `bucket` and `category` int64 [...], `content` float32 [..., c]."""

    bucket: Tensor
    category: Tensor
    content: Tensor


@dataclass(frozen=True, slots=True)
class HistoryBatch:
    """R histories of up to H rows, each [R, H]: `items`, `types` int64, `hours` float32 (age at as_of), `valid` bool."""

    items: ItemBatch
    types: Tensor
    hours: Tensor
    valid: Tensor


@dataclass(frozen=True, slots=True)
class HistoryState:
    """R encoded histories: `keys` [R, heads, H, w], `bias` [R, heads, H], `values` [R, H, w], `user` [R, w],
    `tastes` [R, tastes, w], `size` [R, 2]."""

    keys: Tensor
    bias: Tensor
    values: Tensor
    user: Tensor
    tastes: Tensor
    size: Tensor


class FoundationLike(Protocol):
    """What a foundation model of one's own must offer; shapes as in `FoundationModel`."""

    config: FmConfig

    def embed(self, histories: HistoryBatch, items: ItemBatch) -> Tensor: ...


class FoundationModel(nn.Module):
    """`embed(histories [R, H], items [R, P]) → [R, P, D]`; `tasks(vectors, hours, context) → logits [..., tasks]`."""

    context_mean: Tensor
    context_std: Tensor

    def __init__(self, config: FmConfig) -> None:
        super().__init__()
        self.config = config
        w, heads = config.width, config.heads
        self.item_table = nn.Parameter(torch.empty(config.item_buckets, w))
        self.category_table = nn.Parameter(torch.empty(config.category_buckets, w))
        self.type_table = nn.Parameter(torch.empty(256, w))
        self.target_item_table = nn.Parameter(torch.empty(config.item_buckets, 1))
        if config.content_dims:
            self.content = Linear(config.content_dims, w, bias=False)
        self.age = Linear(_AGES, w)
        self.gate = Linear(w + _AGES, w)
        self.value = Linear(w, w)
        self.key = Linear(w, heads * w, bias=False)
        self.key_bias = Linear(w + _AGES, heads)
        self.user_cross = Linear(w, w)
        self.type_sign = nn.Parameter(torch.empty(256, w))
        self.taste_gate = Linear(w + _AGES, config.tastes)
        self.taste_cross = nn.Parameter(torch.empty(config.tastes, w, w))
        self.attended_cross = nn.Parameter(torch.empty(heads, w, w))
        self.hidden = Linear(config.pair_inputs, config.hidden)
        self.shared = Linear(config.hidden, config.dims)
        seen = config.dims + 4 + config.context_dims
        self.head_hidden = Linear(seen, config.head_hidden * len(config.tasks))
        self.head_out = nn.Parameter(torch.empty(len(config.tasks), config.head_hidden))
        self.head_skip = Linear(seen, len(config.tasks))
        self.register_buffer("context_mean", torch.zeros(config.context_dims))
        self.register_buffer("context_std", torch.ones(config.context_dims))

    @classmethod
    def untrained(cls, config: FmConfig, seed: int) -> FoundationModel:
        """A model with random weights."""
        model = cls(config)
        initialise(model, generator(seed), table_std=_TABLE_STD)
        # from the start every bilinear term is a dot product of items: from random matrices it took hundreds of steps to find that
        eye = torch.eye(config.width)
        with torch.no_grad():
            for matrix in (model.value.weight, model.user_cross.weight, *model.attended_cross, *model.taste_cross):
                matrix.copy_(eye)
            model.type_sign.fill_(1.0)
            model.type_sign[IMPRESSION_CODE] = _SHOWN_SIGN
            for name in ITEM_TABLES:
                model.get_parameter(name).mul_(_ITEM_STD / _TABLE_STD)
            model.key.weight.copy_(eye.repeat(config.heads, 1))
        return model

    @classmethod
    def from_state(cls, config: FmConfig, state: Mapping[str, npt.NDArray[np.generic]]) -> FoundationModel:
        """A model with stored weights, ready to embed. Raises `BundleError` where they don't fit."""
        model = cls(config)
        load_state(model, state, "foundation model")
        return model.eval().requires_grad_(False)

    def state(self) -> State:
        """The tensors that a bundle stores."""
        return state_of(self)

    def embed(self, histories: HistoryBatch, items: ItemBatch) -> Tensor:
        """[R, P, D]: the last shared layer of R x P pairs."""
        return self.pairs(self.encode_history(histories), items)

    def items(self, batch: ItemBatch) -> Tensor:
        """[..., w]: items as the sum of what their id, their category and their content say."""
        out = self.item_table[batch.bucket % self.config.item_buckets]
        out = out + self.category_table[batch.category % self.config.category_buckets]
        return out + self.content(batch.content) if self.config.content_dims else out

    def encode_history(self, batch: HistoryBatch) -> HistoryState:
        """Everything about R histories that no item can change."""
        there = batch.valid.to(torch.float32)  # [R, H]
        ages = age_features(batch.hours)  # [R, H, ages]
        rows = self.items(batch.items)  # [R, H, w]
        kinds = self.type_table[batch.types]  # [R, H, w]
        typed = torch.cat((rows + kinds, ages), 2)  # [R, H, w + ages]
        signed = rows * self.type_sign[batch.types] + kinds
        gate = self.gate(typed).sigmoid() * there[:, :, None]
        values = self.value(signed + self.age(ages)) * there[:, :, None]  # [R, H, w]
        user = (gate * values).sum(1) / (1.0 + gate.sum(1))  # [R, w]
        spans = self.taste_gate(torch.cat((kinds, ages), 2)).sigmoid() * there[:, :, None]  # [R, H, tastes]
        tastes = torch.einsum("rht,rhw->rtw", spans, signed) / (_TASTE_PRIOR + spans.sum(1))[:, :, None]
        tastes = torch.einsum("rtw,twv->rtv", tastes, self.taste_cross)
        r, h, w = rows.shape
        keys = self.key(rows).view(r, h, self.config.heads, w).transpose(1, 2)  # [R, heads, H, w]
        bias = self.key_bias(typed).transpose(1, 2)  # [R, heads, H]
        bias = torch.where(batch.valid[:, None, :], bias, torch.full_like(bias, _EMPTY))
        newest = torch.where(batch.valid, batch.hours, torch.full_like(batch.hours, 720.0)).amin(1)
        size = torch.stack((there.sum(1).log1p() / 4.0, newest.log1p() / 4.0), 1)  # [R, 2]
        return HistoryState(keys, bias, values, user, tastes, size)

    def pairs(self, state: HistoryState, batch: ItemBatch) -> Tensor:
        """[R, P, D]: items [R, P] against their own history."""
        items = self.items(batch)  # [R, P, w]
        r, p, w = items.shape
        logits = torch.einsum("rpw,rahw->raph", items, state.keys) + state.bias[:, :, None, :]
        weights = logits.float().clamp(max=ATTENTION_MAX).exp()
        total = 1.0 + weights.sum(3)  # [R, heads, P]
        attended = torch.einsum("raph,rhw->rapw", weights, state.values) / total[..., None]  # [R, heads, P, w]
        met = torch.einsum("rapw,awv->rapv", attended, self.attended_cross) * items[:, None]
        user = (self.user_cross(state.user)[:, None] * items).expand(r, p, w)
        tastes = state.tastes[:, None] * items[:, :, None]  # [R, P, tastes, w]
        parts = [
            items,
            user,
            state.user[:, None].expand(r, p, w),
            attended.transpose(1, 2).reshape(r, p, -1),
            met.transpose(1, 2).reshape(r, p, -1),
            total.log().transpose(1, 2),
            met.sum(3).transpose(1, 2),
            user.sum(2, keepdim=True),
            tastes.flatten(2),
            tastes.sum(3),
            state.size[:, None].expand(r, p, 2),
            self.target_item_table[batch.bucket % self.config.item_buckets],
        ]
        hidden = torch.nn.functional.silu(self.hidden(torch.cat(parts, 2)))
        return torch.nn.functional.silu(self.shared(hidden)).float()

    def tasks(self, vectors: Tensor, hours: Tensor, context: Tensor) -> Tensor:
        """[..., tasks] logits from vectors [..., D], the hour of the day [...] (0-24) and context [..., C]: the heads."""
        angle = hours[..., None] * (2.0 * torch.pi / 24.0)
        turns = (angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos())
        inputs = torch.cat((vectors, *turns, (context - self.context_mean) / self.context_std), -1)
        tasks = len(self.config.tasks)
        hidden = self.head_hidden(inputs).relu().unflatten(-1, (tasks, self.config.head_hidden))
        logits: Tensor = (hidden * self.head_out).sum(-1) + self.head_skip(inputs)
        return logits


def age_features(hours: Tensor) -> Tensor:
    """[..., 1 + scales]: log1p(hours) / 4 and one decay a scale."""
    decays = [(hours / -scale).exp() for scale in AGE_SCALES_HOURS]
    return torch.stack((hours.log1p() / 4.0, *decays), -1)

"""The engine: a batch of fm-requests in, each user's compressed vectors out, in the same order.

In: requests with a history snapshot and n items each. Out: per request its `Embeddings`, or the `BadRecord` that says why there
are none: one bad request fails alone, and answers never swap places. Batches by size, pads shapes, chooses the precision. Its
numbers are the same within a stated tolerance whatever a request was batched with, and on whichever device. Knows no topic,
queue or deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from models.bundle import Bundle
from models.features import F32, I32
from models.foundation import HOUR_MS, HistoryBatch, ItemBatch
from schemas.errors import BadRecord
from schemas.inference import Embeddings, FmRequest

TOLERANCE = 1e-4
"""Largest difference of any of the FM's numbers (of order one) in float32 between batch mates, thread counts or devices."""

TOLERANCE_BF16 = 0.05
"""The same for bf16: root mean square, in the compressor's standard deviations; bf16 is not used where a probe finds more."""


class ItemLookup(Protocol):
    """Where the engine finds an item's columns; `streams.items.ItemIndex` is one. Rows hold until the next `intern`."""

    @property
    def bucket(self) -> I32: ...
    @property
    def category(self) -> I32: ...
    @property
    def content(self) -> F32: ...

    def intern(self, names: Sequence[str]) -> I32: ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`pairs_max` and `histories_max` bound one pass through the FM; `precision` is `auto` (bf16 on CUDA where a probe finds it
    safe), `float32` or `bf16`."""

    pairs_max: int = 4096
    histories_max: int = 256
    precision: str = "auto"


class Engine:
    """Embeds fm-requests with a bundle's foundation model and compressor. Not for two threads at once."""

    def __init__(
        self, bundle: Bundle, items: ItemLookup, device: str = "cpu", config: EngineConfig | None = None
    ) -> None:
        self.space, self.device, self.config = bundle.space, device, config or EngineConfig()
        self._model, self._compressor, self._items = bundle.foundation, bundle.compressor, items
        if isinstance(self._model, nn.Module):
            self._model.to(device).eval()
        self._bf16 = self.config.precision == "bf16"
        if self.config.precision == "auto" and device.startswith("cuda") and torch.cuda.is_bf16_supported():
            self._bf16 = self.bf16_error() <= TOLERANCE_BF16

    def embed(
        self, requests: Sequence[FmRequest], offsets: Sequence[int] | None = None
    ) -> list[Embeddings | BadRecord]:
        """One answer a request, in order. `offsets`: each request's offset in fm-requests, for `request_offset` (else -1).

        `BadRecord`: `version` for another embedding space, `length` for columns that don't fit, `vector` where no vector is finite.
        An item whose own vector is not usable is left out of its answer; a request without items gets an answer without vectors.
        """
        at = [-1] * len(requests) if offsets is None else offsets
        answers: list[Embeddings | BadRecord | None] = [self._fault(request) for request in requests]
        good = [index for index, fault in enumerate(answers) if fault is None]
        vectors = self._vectors([requests[index] for index in good])
        for index, own in zip(good, vectors, strict=True):
            answers[index] = self._answer(requests[index], int(at[index]), own)
        return [answer for answer in answers if answer is not None]

    def bf16_error(self) -> float:
        """Root mean square difference between bf16 and float32 on made-up histories, in the compressor's standard deviations."""
        generator = np.random.default_rng(0)
        config = self._model.config
        r, h, p = 8, min(64, config.history_rows), 16

        def columns(*shape: int) -> ItemBatch:
            return self._tensors(
                generator.integers(0, config.item_buckets, shape).astype(np.int32),
                generator.integers(0, config.category_buckets, shape).astype(np.int32),
                generator.standard_normal((*shape, config.content_dims)).astype(np.float32),
            )

        history = HistoryBatch(
            columns(r, h),
            self._tensor(generator.integers(1, 12, (r, h))),
            self._tensor(generator.exponential(24.0, (r, h)).astype(np.float32)),
            self._tensor(np.ones((r, h), np.bool_)),
        )
        items = columns(r, p)
        one, other = (self._forward(history, items, bf16).reshape(r * p, -1) for bf16 in (False, True))
        if not np.isfinite(other).all():
            return float("inf")
        gap = self._compressor.standardise(one) - self._compressor.standardise(other)
        return float(np.sqrt(np.square(gap, dtype=np.float64).mean()))

    def _fault(self, request: FmRequest) -> BadRecord | None:
        if request.space != self.space:
            return BadRecord("version", f"asked for embedding space {request.space}, this model's is {self.space}")
        rows = {len(request.history_items), len(request.history_types), len(request.history_ts)}
        if len(rows) > 1:
            return BadRecord("length", f"history columns of {sorted(rows)} rows; they must be equally long")
        if not all(isinstance(name, str) and name for name in (*request.items, *request.history_items)):
            return BadRecord("length", "an item id is not a non-empty string")
        return None

    def _answer(self, request: FmRequest, offset: int, vectors: F32) -> Embeddings | BadRecord:
        usable = self._compressor.usable(vectors)
        if len(usable) and not usable.any():
            return BadRecord("vector", f"none of the {len(usable)} vectors is finite and other than zero")
        codes, scales = self._compressor.encode(vectors[usable])
        items = [item for item, fine in zip(request.items, usable.tolist(), strict=True) if fine]
        return Embeddings(request.user, request.space, request.as_of, offset, items, scales, codes)

    def _vectors(self, requests: Sequence[FmRequest]) -> list[F32]:
        """Per request float32 [n, D]: the FM's vectors. Ids are looked up once for the whole batch."""
        rows_max = self._model.config.history_rows
        names = [name for request in requests for name in (*request.items, *request.history_items[-rows_max:])]
        rows = self._items.intern(names)
        out: list[F32] = [np.zeros((0, self._model.config.dims), np.float32)] * len(requests)
        lengths = [(len(request.items), min(rows_max, len(request.history_items))) for request in requests]
        starts = np.concatenate(([0], np.cumsum([n + h for n, h in lengths]))).astype(np.int64)
        for chunk in self._chunks([n for n, _ in lengths]):
            p, h = (round_up(max(lengths[index][axis] for index in chunk)) for axis in (0, 1))
            item_rows, history_rows = np.full((len(chunk), p), -1, np.int64), np.full((len(chunk), h), -1, np.int64)
            types, hours = np.zeros((len(chunk), h), np.int64), np.zeros((len(chunk), h), np.float32)
            for place, index in enumerate(chunk):
                (own, past), start, request = lengths[index], int(starts[index]), requests[index]
                item_rows[place, :own] = rows[start : start + own]
                history_rows[place, :past] = rows[start + own : start + own + past]
                types[place, :past] = request.history_types[len(request.history_types) - past :]
                ages = request.as_of - request.history_ts[len(request.history_ts) - past :]
                hours[place, :past] = np.maximum(ages, 0) / HOUR_MS
            history = HistoryBatch(
                self._look_up(history_rows), self._tensor(types), self._tensor(hours), self._tensor(history_rows >= 0)
            )
            made = self._forward(history, self._look_up(item_rows), self._bf16)
            for place, index in enumerate(chunk):
                out[index] = made[place, : lengths[index][0]]
        return out

    def _chunks(self, counts: Sequence[int]) -> Iterator[list[int]]:
        """Requests with items, alike in size, so that padding stays small and a pass within `pairs_max` and `histories_max`."""
        chunk: list[int] = []
        for index in sorted((i for i, count in enumerate(counts) if count), key=lambda i: (counts[i], i)):
            full = (len(chunk) + 1) * round_up(counts[index]) > self.config.pairs_max
            if chunk and (full or len(chunk) == self.config.histories_max):
                yield chunk
                chunk = []
            chunk.append(index)
        if chunk:
            yield chunk

    def _look_up(self, rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> ItemBatch:
        """Columns of item rows of any shape; -1 is padding and takes zeros."""
        there = rows >= 0
        if not there.any():
            zeros = np.zeros(rows.shape, np.int32)
            return self._tensors(zeros, zeros, np.zeros((*rows.shape, self._items.content.shape[1]), np.float32))
        content = np.where(there[..., None], self._items.content[rows], np.float32(0))
        return self._tensors(
            np.where(there, self._items.bucket[rows], 0), np.where(there, self._items.category[rows], 0), content
        )

    def _tensors(self, bucket: I32, category: I32, content: F32) -> ItemBatch:
        wide = bucket.astype(np.int64), category.astype(np.int64)
        return ItemBatch(self._tensor(wide[0]), self._tensor(wide[1]), self._tensor(content))

    def _tensor(self, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def _forward(self, history: HistoryBatch, items: ItemBatch, bf16: bool) -> F32:
        kind = self.device.partition(":")[0]
        with torch.inference_mode(), torch.autocast(kind, torch.bfloat16, enabled=bf16):
            return np.asarray(self._model.embed(history, items).float().cpu().numpy(), np.float32)


def round_up(count: int) -> int:
    """`count` up to the next of 8, 16, 32, 64 ... 1,024: few shapes, little padding."""
    return max(8, 1 << max(0, count - 1).bit_length())

"""Training rows of the foundation model: r history snapshots, n pairs that share them, and the catalogue that both point into.

In: columns that a replay of the log writes. Out: padded batches for the model. Rows are in time order; what a history holds was
known at its request's `ts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from models.features import F32, I32, I64, U8
from models.foundation import HOUR_MS, HistoryBatch, ItemBatch

DAY_MS = 86_400_000
GROUP_PAIRS = 32
"""A request's pairs are batched in groups of at most this many, so that one long request does not pad all others."""


@dataclass(frozen=True, slots=True)
class FmRows:
    """r requests, n pairs, m catalogue rows.

    `ts` int64 [r] (UTC ms), never falling. Histories [r, h]: `history_item` int32 (-1 = empty), `history_type` uint8,
    `history_age_ms` int64 (at `ts`). Pairs: `request` int32 [n] (contiguous, never falling), `item` int32 [n], `labels` float32
    [n, tasks] (NaN = not known), `context` float32 [n, C] (the ranker's dense features; C may be 0). `item` and `history_item`
    are rows of `bucket`, `category` int32 [m] and `content` float32 [m, c]: hand in copies of an item index's columns.
    """

    ts: I64
    history_item: I32
    history_type: U8
    history_age_ms: I64
    request: I32
    item: I32
    labels: F32
    bucket: I32
    category: I32
    content: F32
    context: F32

    @property
    def starts(self) -> I64:
        """int64 [r + 1]: where each request's pairs begin."""
        return np.searchsorted(self.request, np.arange(len(self.ts) + 1)).astype(np.int64)

    def columns(self, rows: npt.NDArray[np.integer], device: str) -> ItemBatch:
        """Catalogue columns of item rows of any shape; -1 (empty) takes row 0's, which the caller masks."""
        at = np.maximum(rows, 0)
        parts = (self.bucket[at].astype(np.int64), self.category[at].astype(np.int64), self.content[at])
        return ItemBatch(*(torch.from_numpy(part).to(device) for part in parts))

    def histories(self, chosen: I64, hide_ms: I64, device: str) -> HistoryBatch:
        """The histories of some requests as they were `hide_ms` (int64 [R]) before their request: newer rows are hidden."""
        ages = self.history_age_ms[chosen] - hide_ms[:, None]
        items = self.history_item[chosen]
        valid = (items >= 0) & (ages >= 0)
        used = np.flatnonzero(valid.any(axis=0))  # histories are ragged: leave out columns that are empty for all
        kept = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1)
        hours = (np.maximum(ages[:, kept], 0) / HOUR_MS).astype(np.float32)
        return HistoryBatch(
            self.columns(items[:, kept], device),
            torch.from_numpy(self.history_type[chosen][:, kept].astype(np.int64)).to(device),
            torch.from_numpy(hours).to(device),
            torch.from_numpy(np.ascontiguousarray(valid[:, kept])).to(device),
        )


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs in groups of one request each: `request`, `start`, `count` int64 [g]."""

    request: I64
    start: I64
    count: I64

    @classmethod
    def of(cls, starts: I64, first: int, last: int) -> Groups:
        """Groups of the requests [first, last), whose pairs begin at `starts`."""
        counts = np.diff(starts[first : last + 1])
        pieces = -(-counts // GROUP_PAIRS)
        request = np.repeat(np.arange(first, last), pieces)
        within = np.arange(len(request)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = starts[request] + within * GROUP_PAIRS
        return cls(request, start, np.minimum(GROUP_PAIRS, starts[request + 1] - start))

    def pairs(self, chosen: I64) -> I64:
        """int64 [G, P]: the chosen groups' pair rows, -1 where a group is shorter."""
        counts = self.count[chosen]
        place = np.arange(int(counts.max()) if len(counts) else 0)
        return np.where(place < counts[:, None], self.start[chosen][:, None] + place, -1)

"""Each user's mean vector over the last 24 hours, the second best that a ranker can get for a pair.

In: embeddings messages, and which of their vectors the cache took. Out: mean, count and newest `as_of` a user. Never: floats in
state; sums are fixed-point integers, so that they come out the same in any order.

Vectors lie in panes by `as_of`. A pane counts iff now - window < its start <= now: nothing older than the window ever counts, and
of its oldest end up to one pane is missing. Key: user, space u64, pane u64, both big-endian. Row: i64 count, newest as_of, sum [d].
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.jit import compiled, number, reads, writes
from schemas.errors import BadRecord, StateError
from schemas.inference import Embeddings
from schemas.keys import user_key
from streams.state.prune import Rule, Rules
from streams.state.store import Reader, Transaction

FIXED_POINT = 2.0**20
"""Sums count in units of 2^-20."""
VALUE_MAX = 2.0**40
"""One number of one vector is cut to ±2^40 units (a million): 8 million vectors a pane can't overflow an int64."""

_SPACE = struct.Struct(">Q")
_PANE = struct.Struct(">Q")
_ROW_HEAD = 2

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Means:
    """r users: `mean` float32 [r, d] (zeros where there is none), `count` int64 [r], `newest_ms` int64 [r] as_of (-1 = none)."""

    mean: npt.NDArray[np.float32]
    count: I64
    newest_ms: I64


class Aggregate:
    """Panes of vector sums. `dimensions`: d of the space that is read; other spaces are folded as they are."""

    def __init__(self, dimensions: int, pane_ms: int = 600_000, window_ms: int = 24 * 3_600_000) -> None:
        assert window_ms % pane_ms == 0, f"a window of {window_ms} ms is not whole panes of {pane_ms} ms"
        self.dimensions, self.pane_ms, self.window_ms = dimensions, pane_ms, window_ms

    def fold(self, batch: Sequence[Embeddings], accepted: Sequence[npt.NDArray[np.bool_]], txn: Transaction) -> None:
        """Add the accepted vectors (the masks that `Cache.fold` returned) to their panes."""
        sums: dict[bytes, I64] = {}
        for message, mask in zip(batch, accepted, strict=True):
            if not mask.any():
                continue
            pane = _PANE.pack(message.as_of // self.pane_ms)
            key = user_key(message.user) + _SPACE.pack(message.space) + pane
            added = _row(message, mask)
            sums[key] = _merged(key, sums[key], added) if key in sums else added
        for (key, added), value in zip(sums.items(), txn.get("user_panes", list(sums)), strict=True):
            row = added if value is None else _merged(key, np.frombuffer(value, "<i8"), added)
            txn.put("user_panes", key, row.astype("<i8").tobytes())

    def mean(self, reader: Reader, users: Sequence[str], space: int, now: int | I64) -> Means:
        """Mean over (now - window, now] of each user's vectors in one space; `now` is one time or int64 [r].

        Raises `StateError` where the rows have another d than `dimensions`.
        """
        found = reader.scan("user_panes", [user_key(user) + _SPACE.pack(space) for user in users])
        r, d = len(users), self.dimensions
        rows = [row for user_rows in found for row in user_rows]
        self._check(rows)
        table = np.frombuffer(b"".join([value for _, value in rows]), "<i8").reshape(-1, _ROW_HEAD + d)
        pane = np.frombuffer(b"".join([key[-8:] for key, _ in rows]), ">u8").astype(np.int64)
        ends = np.cumsum([len(user_rows) for user_rows in found], dtype=np.int64)
        at = np.ascontiguousarray(np.broadcast_to(np.asarray(now, np.int64) // self.pane_ms, (r,)))
        means = Means(np.empty((r, d), np.float32), np.empty(r, np.int64), np.empty(r, np.int64))
        _mean(table, pane, ends, at, self.window_ms // self.pane_ms, means.mean, means.count, means.newest_ms)
        return means

    def rules(self) -> Rules:
        """Panes live for the window."""
        pane_ms = self.pane_ms
        return {"user_panes": Rule(lambda key, _: _PANE.unpack(key[-8:])[0] * pane_ms, self.window_ms, self.window_ms)}

    def _check(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        size = 8 * (_ROW_HEAD + self.dimensions)
        for key, value in rows:
            if len(value) != size:
                raise StateError(
                    f"user_panes of key {key!r}: a sum has {len(value) // 8 - _ROW_HEAD} numbers, the ranker reads "
                    f"{self.dimensions}; a compressor of another size needs another embedding space"
                )


@compiled(
    reads(np.int64, 2), reads(np.int64), reads(np.int64), reads(np.int64), number(np.int64),
    writes(np.float32, 2), writes(np.int64), writes(np.int64),
)  # fmt: skip
def _mean(table: I64, pane: I64, ends: I64, now: I64, panes: int, mean: F32, count: I64, newest: I64) -> None:
    """User i's rows of `table` end at `ends[i]`; sums are exact integers, so their order doesn't matter."""
    d, start = mean.shape[1], 0
    total = np.zeros(d, np.int64)
    for i in range(len(ends)):
        count[i], newest[i] = 0, -1
        total[:] = 0
        for row in range(start, ends[i]):
            if 0 <= now[i] - pane[row] < panes:
                count[i] += table[row, 0]
                newest[i] = max(newest[i], table[row, 1])
                total += table[row, _ROW_HEAD:]
        for k in range(d):
            mean[i, k] = total[k] / (max(count[i], 1) * FIXED_POINT)
        start = ends[i]


def _row(message: Embeddings, mask: npt.NDArray[np.bool_]) -> I64:
    """Count, as_of and fixed-point sum of one message's accepted vectors, int64 [2 + d]."""
    scaled = message.codes[mask].astype(np.float64) * (message.scales[mask, None].astype(np.float64) * FIXED_POINT)
    total = np.rint(scaled.clip(-VALUE_MAX, VALUE_MAX)).astype(np.int64).sum(axis=0)
    return np.concatenate((np.array([mask.sum(), message.as_of], np.int64), total))


def _merged(key: bytes, a: I64, b: I64) -> I64:
    """Raises `BadRecord`: it is the record that comes with another size than its space has here."""
    if len(a) != len(b):
        raise BadRecord(
            "vector",
            f"user_panes of key {key!r}: sums of {len(a) - _ROW_HEAD} and {len(b) - _ROW_HEAD} numbers in one embedding space; "
            "a compressor of another size needs another space",
        )
    merged = a + b
    merged[1] = max(a[1], b[1])
    return merged

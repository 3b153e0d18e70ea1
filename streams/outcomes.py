"""Samples of considered pairs that wait for their outcome: was the pair asked for within the TTL?

In: considered pairs (admitted or not, so that the sample is of all of them), and demands. Out: labelled feature rows once the
TTL has passed in event time. Never: holds more than `samples_max`; when full it halves its rate and keeps the half that the
lower rate would have taken, so that what is left is still a fair sample. Which pairs are taken is a hash of pair and time, not
chance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streams.pairs import U64, mix64
from streams.sources import F32, I64
from streams.state.column_log import Changed, ColumnLog
from streams.state.store import Store, Transaction

_FULL = 1 << 63
_REFILL_SHARE = 0.25
_LABELS_WAIT_MS = 10 * 60_000


class Outcomes:
    """Pending samples in the order of their time; columns share the range [start, end).

    Outcomes are handed out `labels_min` or more at once, or what there is when the oldest has been known for ten minutes: what they
    teach is then written once, and not with each batch.
    """

    def __init__(
        self, samples_max: int, rate: float, ttl_ms: int, grace_ms: int, features: int, seed: int, labels_min: int = 1
    ) -> None:
        assert 0 < rate <= 1, f"rate is {rate}; it is the share of pairs to sample, above 0 and at most 1"
        self.samples_max, self.ttl_ms, self.grace_ms = samples_max, ttl_ms, grace_ms
        self._seed, self._labels_min = np.uint64(seed), labels_min
        self._threshold_max = self._threshold = int(rate * _FULL)
        self._start = self._end = 0
        self._columns: dict[str, npt.NDArray[Any]] = {
            "key": np.zeros(0, np.uint64),
            "hash": np.zeros(0, np.uint64),
            "ts": np.zeros(0, np.int64),
            "asked": np.zeros(0, np.bool_),
            "predicted": np.zeros(0, np.float32),
            "rows": np.zeros((0, features), np.float32),
        }
        self._order: I64 | None = None  # positions by key; None where it has to be made anew
        self._changed = Changed()
        self._log = ColumnLog(
            "outcomes",
            [
                ("key", "<u8"),
                ("hash", "<u8"),
                ("ts", "<i8"),
                ("asked", "?"),
                ("predicted", "<f4"),
                ("rows", "<f4", (features,)),
            ],
        )

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def rate(self) -> float:
        """Share of considered pairs that is sampled at present."""
        return self._threshold / _FULL

    def choose(self, keys: U64, now: int) -> I64:
        """Which of the pairs considered at `now` to `add`: positions, ascending."""
        if len(self) < self.samples_max * _REFILL_SHARE:
            self._threshold = min(self._threshold_max, self._threshold * 2)
        return np.flatnonzero(self._hash(keys, now) < self._threshold)

    def add(self, keys: U64, now: int, rows: F32, predicted: F32) -> None:
        """Chosen pairs with their features [n, features] and forecast."""
        if not len(keys):
            return
        new = {
            "key": keys,
            "hash": self._hash(keys, now),
            "ts": now,
            "asked": False,
            "predicted": predicted,
            "rows": rows,
        }
        self._reserve(len(keys))
        place = slice(self._end, self._end + len(keys))
        for name, values in new.items():
            self._columns[name][place] = values
        self._changed.add(np.arange(place.start, place.stop))
        self._end += len(keys)
        self._order = None
        while len(self) > self.samples_max:
            self._threshold //= 2
            self._keep(np.flatnonzero(self._column("hash") < self._threshold))

    def asked(self, keys: U64, ts: I64) -> None:
        """These pairs were ranked at `ts` [n]."""
        if not len(self) or not len(keys):
            return
        key, taken_at, asked = self._column("key"), self._column("ts"), self._column("asked")
        if self._order is None:
            self._order = np.argsort(key, kind="stable")
        in_order = key[self._order]
        at, end = in_order.searchsorted(keys, "left"), in_order.searchsorted(keys, "right")
        while (more := at < end).any():
            at, end, ts = at[more], end[more], ts[more]
            sample = self._order[at]
            hit = (ts > taken_at[sample]) & (ts <= taken_at[sample] + self.ttl_ms)
            self._changed.add(self._start + sample[hit & ~asked[sample]])
            asked[sample[hit]] = True
            at = at + 1

    def ripe(self, now: int) -> tuple[F32, npt.NDArray[np.bool_], F32]:
        """Take out the samples whose outcome is known: feature rows [n, features], whether asked, forecast; none while they are
        few and have not waited long.
        """
        taken_at, known = self._column("ts"), now - self.ttl_ms - self.grace_ms
        count = int(taken_at.searchsorted(known, "right"))
        if 0 < count < self._labels_min and taken_at[0] > known - _LABELS_WAIT_MS:
            count = 0
        taken = slice(self._start, self._start + count)
        rows, asked, predicted = (self._columns[name][taken].copy() for name in ("rows", "asked", "predicted"))
        self._start += count
        if count:
            self._order = None
        return rows, asked, predicted

    def save(self, txn: Transaction) -> tuple[int, int, int]:
        """Write the samples that changed; returns what `load` wants."""
        self._log.save(self._changed, self._start, self._end, self._columns, txn)
        return self._start, self._end, self._threshold

    def load(self, store: Store, saved: tuple[int, int, int] | None) -> bool:
        """Take the samples that were saved; False where they are of other features, or more than there is room for."""
        start, end, threshold = saved or (0, 0, 0)
        table = self._log.load(store, end if saved else None)
        if table is None or end - start > self.samples_max:
            self._changed.everything()
            return False
        self._columns = {name: table[name].copy() for name in self._columns}
        self._start, self._end, self._order = start, end, None
        self._threshold = min(threshold, self._threshold_max)
        return True

    def _hash(self, keys: U64, now: int) -> U64:
        return mix64(keys ^ mix64(np.array([now], np.uint64) ^ self._seed)) >> np.uint64(1)

    def _column(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name][self._start : self._end]

    def _keep(self, positions: I64) -> None:
        for name, values in self._columns.items():
            values[: len(positions)] = self._column(name)[positions]
        self._start, self._end = 0, len(positions)
        self._changed.everything()
        self._order = None

    def _reserve(self, count: int) -> None:
        """Room for `count` more at the end: move to the front, then grow."""
        if self._end + count <= len(self._columns["key"]):
            return
        if self._start:
            self._keep(np.arange(len(self)))
        rows = max(self._end + count, 2 * len(self._columns["key"]), 1024)
        if rows > len(self._columns["key"]) and self._end + count > len(self._columns["key"]):
            for name, values in self._columns.items():
                more = np.zeros((rows - len(values), *values.shape[1:]), values.dtype)
                self._columns[name] = np.concatenate((values, more))

"""What was asked of the FM and what came back, per pair: so that nothing fresh or in flight is asked for again.

In: issued requests and the heads of embeddings (which pairs, as_of, space). Out: per pair whether it is fresh or in flight.
Never: an authority: a lost row costs one FM call, and a vector of another embedding space counts as none.

In flight counts in event time, from the request's `as_of` to its deadline and a grace. Kept in the store like the other tables of
speculation (`save`, `load`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streams.pairs import I64, U64, PairTable
from streams.state.store import Store, Transaction

Mask = npt.NDArray[np.bool_]


class Ledger:
    """One partition's pairs; `refresh_ms`: a vector that expires sooner than this no longer counts as fresh."""

    def __init__(self, rows_max: int, ttl_ms: int, refresh_ms: int, inflight_ms: int) -> None:
        self.ttl_ms, self.refresh_ms, self.inflight_ms = ttl_ms, refresh_ms, inflight_ms
        self._pairs = PairTable("ledger", rows_max, {"as_of": "<i8", "until": "<i8"})

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def evicted(self) -> int:
        """Pairs forgotten for want of room."""
        return self._pairs.evicted

    def states(self, keys: U64, now: int) -> tuple[Mask, Mask]:
        """Per pair: fresh (an embedding that lasts), and in flight (asked for, neither here nor given up)."""
        rows = self._pairs.find(keys)
        known = rows >= 0
        as_of = np.where(known, self._pairs.columns["as_of"][rows], 0)
        until = np.where(known, self._pairs.columns["until"][rows], 0)
        return (as_of > 0) & (now - as_of < self.ttl_ms - self.refresh_ms), until > now

    def issue(self, keys: U64, as_of: int) -> None:
        """These pairs go to the FM now."""
        rows = self._pairs.rows(keys, as_of)
        self._pairs.columns["until"][rows[rows >= 0]] = as_of + self.inflight_ms

    def embedded(self, keys: U64, as_of: I64) -> None:
        """Embeddings of these pairs, of this ledger's space, are on their topic; one older than the known changes nothing."""
        if not len(keys):
            return
        rows = self._pairs.rows(keys, int(as_of.max()))
        kept = rows >= 0
        rows, kept_as_of = rows[kept], as_of[kept]
        columns = self._pairs.columns
        np.maximum.at(columns["as_of"], rows, kept_as_of)
        columns["until"][rows[columns["until"][rows] - self.inflight_ms <= kept_as_of]] = 0

    def save(self, txn: Transaction) -> None:
        """Write the pairs that changed."""
        self._pairs.save(txn)

    def load(self, store: Store, size: int | None) -> bool:
        """Take the `size` pairs that were saved; False where they don't fit."""
        return self._pairs.load(store, size)

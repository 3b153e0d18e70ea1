"""What was asked of the FM and what came back, per pair: so that nothing fresh or in flight is asked for again.

In: issued requests and the heads of embeddings (which pairs, as_of, space). Out: per pair whether it is fresh or in flight.
Never: an authority: a lost row costs one FM call, and a vector of another embedding space counts as none.

It is kept as a log in the store's soft table, one row a message (as_of first, so that key order is time order), and read back
in that order on opening. In flight counts in event time, from the request's `as_of` to its deadline and a grace.
"""

from __future__ import annotations

import struct
from collections import deque

import numpy as np
import numpy.typing as npt

from schemas.keys import prefixed
from streams.pairs import U64, PairTable
from streams.state.store import Store, Transaction

_PREFIX = prefixed(b"ledger")
_KEY = struct.Struct(">qQIc")  # as_of, user hash, serial, kind
_ISSUED, _FRESH = b"i", b"f"
_SPACE = struct.Struct("<Q")

Mask = npt.NDArray[np.bool_]


class Ledger:
    """One partition's pairs; `refresh_ms`: a vector that expires sooner than this no longer counts as fresh."""

    def __init__(self, rows_max: int, ttl_ms: int, refresh_ms: int, inflight_ms: int, space: int) -> None:
        self.rows_max, self.ttl_ms, self.refresh_ms, self.inflight_ms = rows_max, ttl_ms, refresh_ms, inflight_ms
        self.space = space
        self.other_space = 0
        """Embeddings seen of another space."""
        self._pairs = PairTable(rows_max, {"as_of": np.int64, "until": np.int64})
        self._log: deque[tuple[int, bytes, int]] = deque()  # as_of, key, pairs
        self._logged = 0
        self._serial = 0

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

    def issue(self, user_hash: int, keys: U64, as_of: int, txn: Transaction | None) -> None:
        """These pairs of one user go to the FM now."""
        rows = self._pairs.rows(keys, as_of)
        self._pairs.columns["until"][rows[rows >= 0]] = as_of + self.inflight_ms
        self._write(txn, _ISSUED, user_hash, keys, as_of)

    def embedded(self, user_hash: int, keys: U64, as_of: int, space: int, txn: Transaction | None) -> None:
        """Embeddings of these pairs of one user are on their topic; an older one than the known changes nothing."""
        if space != self.space:
            self.other_space += 1
            return
        rows = self._pairs.rows(keys, as_of)
        rows = rows[rows >= 0]
        columns = self._pairs.columns
        columns["as_of"][rows] = np.maximum(columns["as_of"][rows], as_of)
        answered = rows[columns["until"][rows] - self.inflight_ms <= as_of]
        columns["until"][answered] = 0
        self._write(txn, _FRESH, user_hash, keys, as_of)

    def prune(self, now: int, txn: Transaction) -> None:
        """Remove log rows that no longer matter, or that are more than the ledger can hold."""
        oldest = now - max(self.ttl_ms, self.inflight_ms)
        while self._log and (self._log[0][0] <= oldest or self._logged > 2 * self.rows_max):
            _, key, count = self._log.popleft()
            self._logged -= count
            txn.delete("soft", key)

    def load(self, store: Store) -> None:
        """Read the log back; rows of another space are left for `prune`."""
        for key, value in store.rows("soft", _PREFIX):
            as_of, user_hash, serial, kind = _KEY.unpack(key[len(_PREFIX) :])
            self._serial = max(self._serial, serial)
            (space,) = _SPACE.unpack_from(value)
            pairs = np.frombuffer(value, "<u8", offset=_SPACE.size).astype(np.uint64)
            self._log.append((as_of, key, len(pairs)))
            self._logged += len(pairs)
            if space == self.space and kind == _ISSUED:
                self.issue(user_hash, pairs, as_of, None)
            elif space == self.space:
                self.embedded(user_hash, pairs, as_of, space, None)

    def _write(self, txn: Transaction | None, kind: bytes, user_hash: int, keys: U64, as_of: int) -> None:
        if txn is None:
            return
        self._serial = (self._serial + 1) & 0xFFFFFFFF
        key = _PREFIX + _KEY.pack(as_of, user_hash, self._serial, kind)
        txn.put("soft", key, _SPACE.pack(self.space) + keys.astype("<u8").tobytes())
        self._log.append((as_of, key, len(keys)))
        self._logged += len(keys)

"""What was asked of the FM and what came back, per pair: so that nothing fresh or in flight is asked for again.

In: issued requests and the heads of embeddings (which pairs, as_of, space). Out: per pair whether it is fresh or in flight.
Never: an authority: a lost row costs one FM call, and a vector of another embedding space counts as none.

It is kept as a log in the store's soft table, one row a batch (time first, so that key order is time order), and read back in that
order on opening. In flight counts in event time, from the request's `as_of` to its deadline and a grace.
"""

from __future__ import annotations

import struct
from collections import deque

import numpy as np
import numpy.typing as npt

from schemas.keys import prefixed
from streams.pairs import I64, U64, PairTable
from streams.state.store import Store, Transaction

_PREFIX = prefixed(b"ledger")
_KEY = struct.Struct(">qIc")  # newest as_of, serial, kind
_ISSUED, _EMBEDDED = b"i", b"e"
_SPACE = struct.Struct("<Q")
_PAIR = np.dtype([("key", "<u8"), ("as_of", "<i8")])

Mask = npt.NDArray[np.bool_]


class Ledger:
    """One partition's pairs; `refresh_ms`: a vector that expires sooner than this no longer counts as fresh."""

    def __init__(self, rows_max: int, ttl_ms: int, refresh_ms: int, inflight_ms: int, space: int) -> None:
        self.rows_max, self.ttl_ms, self.refresh_ms, self.inflight_ms = rows_max, ttl_ms, refresh_ms, inflight_ms
        self.space = space
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

    def issue(self, keys: U64, as_of: int, txn: Transaction | None) -> None:
        """These pairs go to the FM now."""
        if not len(keys):
            return
        rows = self._pairs.rows(keys, as_of)
        self._pairs.columns["until"][rows[rows >= 0]] = as_of + self.inflight_ms
        self._write(txn, _ISSUED, keys, np.full(len(keys), as_of))

    def embedded(self, keys: U64, as_of: I64, txn: Transaction | None) -> None:
        """Embeddings of these pairs, of this ledger's space, are on their topic; one older than the known changes nothing."""
        if not len(keys):
            return
        rows = self._pairs.rows(keys, int(as_of.max()))
        kept = rows >= 0
        rows, kept_as_of = rows[kept], as_of[kept]
        columns = self._pairs.columns
        np.maximum.at(columns["as_of"], rows, kept_as_of)
        columns["until"][rows[columns["until"][rows] - self.inflight_ms <= kept_as_of]] = 0
        self._write(txn, _EMBEDDED, keys, as_of)

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
            as_of, serial, kind = _KEY.unpack(key[len(_PREFIX) :])
            (space,) = _SPACE.unpack_from(value)
            pairs = np.frombuffer(value, _PAIR, offset=_SPACE.size)
            self._serial = max(self._serial, serial)
            self._log.append((as_of, key, len(pairs)))
            self._logged += len(pairs)
            if space == self.space and kind == _ISSUED:
                self.issue(pairs["key"].astype(np.uint64), as_of, None)
            elif space == self.space:
                self.embedded(pairs["key"].astype(np.uint64), pairs["as_of"].astype(np.int64), None)

    def _write(self, txn: Transaction | None, kind: bytes, keys: U64, as_of: I64) -> None:
        if txn is None:
            return
        pairs = np.empty(len(keys), _PAIR)
        pairs["key"], pairs["as_of"] = keys, as_of
        newest = int(as_of.max())
        self._serial = (self._serial + 1) & 0xFFFFFFFF
        key = _PREFIX + _KEY.pack(newest, self._serial, kind)
        txn.put("soft", key, _SPACE.pack(self.space) + pairs.tobytes())
        self._log.append((newest, key, len(keys)))
        self._logged += len(keys)

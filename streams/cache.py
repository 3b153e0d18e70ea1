"""The pair table: one compressed vector for each user and item, in the embedding space that made it.

In: embeddings messages. Out: a user's pairs in one space, with `as_of`; which of a message's vectors were new.
Never: renews a row that did not change, mixes spaces, or removes a row because it expired: freshness is judged on read.

Newest `as_of` wins. An equal one is a duplicate and an older one late; both are dropped and counted, so a restarted FM consumer
changes nothing. Key: user, space u64 big-endian, item. Row: as_of i64, scale f32, code i8 [d].
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.errors import StateError
from schemas.inference import Embeddings
from schemas.keys import user_key
from streams.state.prune import Rule, Rules
from streams.state.store import FoldCounts, Reader, Row, Transaction

RETENTION_MS_MIN = 24 * 3_600_000
"""Pairs are kept at least this long, so that the TTL can be raised without a restore."""

_SPACE = struct.Struct(">Q")
_AS_OF = struct.Struct("<q")
_HEAD = struct.Struct("<qf")

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PairRows:
    """A user's m pairs in one space, fresh or not, by item.

    `items`, `as_of` int64 [m], `scales` float32 [m], `codes` int8 [m, d]; vector i is `codes[i] * scales[i]`.
    """

    items: list[str]
    as_of: npt.NDArray[np.int64]
    scales: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int8]

    def find(self, items: Sequence[str]) -> npt.NDArray[np.int64]:
        """Where each item lies here, int64 [n]; -1: nowhere."""
        places = {item: place for place, item in enumerate(self.items)}
        return np.fromiter([places.get(item, -1) for item in items], np.int64, len(items))


class Cache:
    """Pairs with a TTL in ms of event time (0 = every pair is expired). `dimensions`: d of the space that is read."""

    def __init__(self, ttl_ms: int, dimensions: int) -> None:
        self.ttl_ms, self.dimensions = ttl_ms, dimensions
        self._layout = np.dtype([("as_of", "<i8"), ("scale", "<f4"), ("code", "i1", (dimensions,))])

    def fold(self, batch: Sequence[Embeddings], txn: Transaction) -> tuple[FoldCounts, list[Mask]]:
        """Take messages in offset order; returns the counts, and for each message which of its vectors were taken, bool [n]."""
        keys = [_keys(message) for message in batch]
        wanted = list(dict.fromkeys(key for message_keys in keys for key in message_keys))
        rows = txn.get("pairs", wanted)
        newest = {key: _AS_OF.unpack_from(row)[0] for key, row in zip(wanted, rows, strict=True) if row is not None}
        counts, masks = FoldCounts(), []
        for message, message_keys in zip(batch, keys, strict=True):
            counted, mask = _take(message, message_keys, newest, txn)
            counts += counted
            masks.append(mask)
        return counts, masks

    def read(self, reader: Reader, user: str, space: int) -> PairRows:
        """All of one user's pairs in one space."""
        return self.read_many(reader, [user], space)[0]

    def read_many(self, reader: Reader, users: Sequence[str], space: int) -> list[PairRows]:
        """All pairs of each user in one space. Raises `StateError` where the rows have another d than `dimensions`."""
        prefixes = [user_key(user) + _SPACE.pack(space) for user in users]
        found = reader.scan("pairs", prefixes)
        return [self._decode(rows, len(prefix)) for rows, prefix in zip(found, prefixes, strict=True)]

    def fresh(self, as_of: npt.NDArray[np.int64], now: int) -> Mask:
        """Which of these are fresh at `now`: iff now - as_of < ttl; at exactly the TTL a vector is expired."""
        return now - as_of < self.ttl_ms

    def rules(self) -> Rules:
        """Pairs live for the TTL, and for a day at least."""
        retention_ms = max(self.ttl_ms, RETENTION_MS_MIN)
        return {"pairs": Rule(_as_of, retention_ms, retention_ms)}

    def _decode(self, rows: list[Row], prefix_bytes: int) -> PairRows:
        values = [value for _, value in rows]
        size = self._layout.itemsize
        if any(len(value) != size for value in values):
            raise StateError(
                f"pairs of key {rows[0][0]!r}: a vector has {len(values[0]) - _HEAD.size} numbers, the ranker reads "
                f"{self.dimensions}; a compressor of another size needs another embedding space"
            )
        table = np.frombuffer(b"".join(values), self._layout)
        items = [key[prefix_bytes:].decode() for key, _ in rows]
        return PairRows(items, table["as_of"].copy(), table["scale"].copy(), table["code"])


def _keys(message: Embeddings) -> list[bytes]:
    prefix = user_key(message.user) + _SPACE.pack(message.space)
    return [prefix + item.encode() for item in message.items]


def _take(
    message: Embeddings, keys: list[bytes], newest: dict[bytes, int], txn: Transaction
) -> tuple[FoldCounts, Mask]:
    """One message into the table; `newest` holds the as_of reached by each key and moves along."""
    as_of, never = message.as_of, -(2**63)
    before = [newest.get(key, never) for key in keys]
    duplicate = late = 0
    mask = np.zeros(len(keys), np.bool_)
    scales = message.scales.tolist()
    codes = np.ascontiguousarray(message.codes, np.int8)
    for i, (key, reached) in enumerate(zip(keys, before, strict=True)):
        if as_of < reached:
            late += 1
        elif as_of == newest.get(key):  # as it was, or from an earlier place in this very message
            duplicate += 1
        else:
            newest[key] = as_of
            mask[i] = True
            txn.put("pairs", key, _HEAD.pack(as_of, scales[i]) + codes[i].tobytes())
    return FoldCounts(len(keys) - duplicate - late, duplicate, late), mask


def _as_of(_: bytes, value: bytes) -> int:
    as_of: int = _AS_OF.unpack_from(value)[0]
    return as_of

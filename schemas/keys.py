"""Ids, composite keys and hashes: how a user, an item and a pair are named in every table and on every topic.

In: what a producer wrote. Out: validated UTF-8 strings and prefix-safe bytes. Never normalises an id.
"""

from __future__ import annotations

import hashlib
import struct

from schemas.errors import BadRecord

ID_BYTES_MAX = 256
"""Longest id in UTF-8 bytes; longer ones are dead-lettered, never cut."""

_LENGTH = struct.Struct(">H")


def valid_id(value: str | int, field: str) -> str:
    """The id as a string of 1-256 UTF-8 bytes; integers become their decimal string.

    Raises `BadRecord` (`id_empty`, `id_long`, `id_surrogate`).
    """
    text = value if isinstance(value, str) else str(value)
    if text.isascii() and 0 < len(text) <= ID_BYTES_MAX:
        return text
    if not text:
        raise BadRecord("id_empty", f"{field} is empty; send 1 to {ID_BYTES_MAX} bytes")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise BadRecord("id_surrogate", f"{field} holds a lone surrogate; send valid UTF-8") from None
    if size > ID_BYTES_MAX:
        raise BadRecord("id_long", f"{field} has {size} bytes; send 1 to {ID_BYTES_MAX}")
    return text


def prefixed(part: bytes) -> bytes:
    """`part` behind its length, so that no composite key is another's prefix by accident."""
    return _LENGTH.pack(len(part)) + part


def user_key(user: str) -> bytes:
    """Prefix of all of a user's rows: (`a:b`, `c`) and (`a`, `b:c`) never meet."""
    return prefixed(user.encode())


def hash64(text: str | bytes) -> int:
    """Stable unsigned 64-bit hash (BLAKE2b); the same on every machine and in every run."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 over a key, as Java's default partitioner computes it (unsigned 32 bits)."""
    length = len(data)
    h = (0x9747B28C ^ length) & 0xFFFFFFFF
    for (k,) in struct.iter_unpack("<I", data[: length & ~3]):
        k = k * 0x5BD1E995 & 0xFFFFFFFF
        k = (k ^ k >> 24) * 0x5BD1E995 & 0xFFFFFFFF
        h = (h * 0x5BD1E995 & 0xFFFFFFFF) ^ k
    if tail := data[length & ~3 :]:
        h = (h ^ int.from_bytes(tail, "little")) * 0x5BD1E995 & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0x5BD1E995 & 0xFFFFFFFF
    return h ^ h >> 15


def partition_of(user: str, partitions: int) -> int:
    """The partition that Java's default partitioner gives a key (the only place where a key is hashed)."""
    return (murmur2(user.encode()) & 0x7FFFFFFF) % partitions

"""The two inner records: a request for FM work, and the embeddings that answer it. Fixed little-endian layouts.

In: columns. Out: bytes that numpy reads without copying, behind a magic, a version and a total length that are checked before
anything is believed. A reader accepts the version before its own.

    fm-request   "SLFQ" header, p_asked f32[n], value f32[n], history_ts i64[h], sources u8[n], history_types u8[h],
                 lengths u16[n + h], then the bytes of user, items, history items
    embeddings   "SLEM" header, scales f32[n], codes i8[n, d], lengths u16[n], then the bytes of user and items
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from schemas.errors import BadRecord

VERSION = 2
"""Written by this release; it reads VERSION and VERSION - 1 (version 1 had no origin offset in the header's last field)."""

ITEMS_MAX = 1000
HISTORY_MAX = 512
DIMENSIONS_MAX = 512

SOURCES = ("reactive", "revisit", "covisit", "popular", "category", "similar")
"""Where a candidate came from; a source's code is its index."""

_FM_MAGIC, _EM_MAGIC = b"SLFQ", b"SLEM"
# magic, version, reserved, n, h or d, user bytes, total bytes, space, as_of, deadline budget ms, offset of the events applied
_FM_HEADERS = {1: struct.Struct("<4sBBHHHIQqqq"), 2: struct.Struct("<4sBBHHHIQqqqq")}
_EM_HEADERS = {1: struct.Struct("<4sBBHHHIQq"), 2: struct.Struct("<4sBBHHHIQqq")}

_Scalar = TypeVar("_Scalar", bound=np.generic)

F32, I64, U8, I8 = np.float32, np.int64, np.uint8, np.int8


@dataclass(frozen=True, slots=True)
class FmRequest:
    """FM work for one user: n items to embed against one history snapshot.

    `as_of`: the partition's clock (UTC ms) when the history was taken. `deadline_ms`: budget from the record's append time.
    `events_offset`/`results_offset`: next offsets that the decision rests on (`results_offset` is -1 in version 1).
    """

    user: str
    space: int
    as_of: int
    deadline_ms: int
    events_offset: int
    results_offset: int
    items: list[str]
    p_asked: npt.NDArray[np.float32]
    value: npt.NDArray[np.float32]
    sources: npt.NDArray[np.uint8]
    history_items: list[str]
    history_types: npt.NDArray[np.uint8]
    history_ts: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """n compressed vectors of one user: item i's vector is `codes[i] * scales[i]` in embedding space `space`.

    `codes` int8 [n, d], `scales` float32 [n]. `request_offset`: the fm-request's offset in the same partition (-1 in version 1).
    """

    user: str
    space: int
    as_of: int
    request_offset: int
    items: list[str]
    scales: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int8]


def encode_fm_request(request: FmRequest) -> bytes:
    """Bytes of one request; the caller keeps n ≤ ITEMS_MAX and h ≤ HISTORY_MAX."""
    user, items, lengths = _strings(request.user, [*request.items, *request.history_items])
    arrays = (
        np.asarray(request.p_asked, F32).tobytes(),
        np.asarray(request.value, F32).tobytes(),
        np.asarray(request.history_ts, I64).tobytes(),
        np.asarray(request.sources, U8).tobytes(),
        np.asarray(request.history_types, U8).tobytes(),
        lengths,
    )
    header = _FM_HEADERS[VERSION]
    total = header.size + sum(map(len, arrays)) + len(user) + len(items)
    head = header.pack(
        _FM_MAGIC, VERSION, 0, len(request.items), len(request.history_items), len(user), total, request.space,
        request.as_of, request.deadline_ms, request.events_offset, request.results_offset,
    )  # fmt: skip
    return b"".join((head, *arrays, user, items))


def decode_fm_request(value: bytes | None) -> FmRequest:
    """One request; raises `BadRecord` (`empty`, `magic`, `version`, `length`)."""
    data, fields, start = _header(value, _FM_MAGIC, _FM_HEADERS)
    n, h, user_bytes, _total, space, as_of, deadline, events_offset = fields[:8]
    results_offset = fields[8] if len(fields) > 8 else -1
    if n > ITEMS_MAX or h > HISTORY_MAX:
        raise BadRecord("length", f"{n} items and {h} history rows; at most {ITEMS_MAX} and {HISTORY_MAX}")
    reader = _Reader(data, start)
    p_asked, worth = reader.take(F32, n), reader.take(F32, n)
    history_ts = reader.take(I64, h)
    sources, history_types = reader.take(U8, n), reader.take(U8, h)
    names = reader.strings(user_bytes, n + h)
    return FmRequest(
        names[0], space, as_of, deadline, events_offset, results_offset, names[1 : n + 1], p_asked, worth, sources,
        names[n + 1 :], history_types, history_ts,
    )  # fmt: skip


def encode_embeddings(embeddings: Embeddings) -> bytes:
    """Bytes of one user's vectors; `codes` must be [n, d]."""
    n, d = embeddings.codes.shape
    user, items, lengths = _strings(embeddings.user, embeddings.items)
    arrays = (np.asarray(embeddings.scales, F32).tobytes(), np.asarray(embeddings.codes, I8).tobytes(), lengths)
    header = _EM_HEADERS[VERSION]
    total = header.size + sum(map(len, arrays)) + len(user) + len(items)
    head = header.pack(
        _EM_MAGIC, VERSION, 0, n, d, len(user), total, embeddings.space, embeddings.as_of, embeddings.request_offset
    )
    return b"".join((head, *arrays, user, items))


def decode_embeddings(value: bytes | None) -> Embeddings:
    """One user's vectors; raises `BadRecord` (`empty`, `magic`, `version`, `length`, `vector`)."""
    data, fields, start = _header(value, _EM_MAGIC, _EM_HEADERS)
    n, d, user_bytes, _total, space, as_of = fields[:6]
    request_offset = fields[6] if len(fields) > 6 else -1
    if n > ITEMS_MAX or not 0 < d <= DIMENSIONS_MAX:
        raise BadRecord("length", f"{n} vectors of {d} numbers; at most {ITEMS_MAX} of 1 to {DIMENSIONS_MAX}")
    reader = _Reader(data, start)
    scales = reader.take(F32, n)
    codes = reader.take(I8, n * d).reshape(n, d)
    names = reader.strings(user_bytes, n)
    if not np.isfinite(scales).all() or (scales <= 0).any() or not codes.any(axis=1).all():
        raise BadRecord("vector", "an embedding is all zero or its scale is not a positive finite number")
    return Embeddings(names[0], space, as_of, request_offset, names[1:], scales, codes)


def _header(value: bytes | None, magic: bytes, layouts: dict[int, struct.Struct]) -> tuple[bytes, tuple[int, ...], int]:
    """Checked fields after magic, version and the reserved byte, and where the arrays begin."""
    if not value:
        raise BadRecord("empty", "the value is null or empty")
    if len(value) < 5 or value[:4] != magic:
        raise BadRecord("magic", f"the value begins with {value[:4]!r}, not {magic!r}")
    layout = layouts.get(value[4])
    if layout is None:
        raise BadRecord(
            "version", f"version {value[4]}; this release reads {sorted(layouts)}; upgrade the readers first"
        )
    if len(value) < layout.size:
        raise BadRecord("length", f"{len(value)} bytes are shorter than the header")
    fields = layout.unpack_from(value)[3:]
    if fields[3] != len(value):
        raise BadRecord("length", f"the header says {fields[3]} bytes, the value has {len(value)}")
    return value, fields, layout.size


def _strings(user: str, names: Sequence[str]) -> tuple[bytes, bytes, bytes]:
    """UTF-8 of the user, of all names joined, and the names' lengths as u16."""
    encoded = [name.encode() for name in names]
    return user.encode(), b"".join(encoded), np.fromiter(map(len, encoded), np.dtype("<u2"), len(encoded)).tobytes()


class _Reader:
    """Takes arrays off the front of a record; refuses to read past its end."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data, self._at = data, start

    def take(self, dtype: type[_Scalar], count: int) -> npt.NDArray[_Scalar]:
        kind = np.dtype(dtype).newbyteorder("<")
        end = self._at + kind.itemsize * count
        if end > len(self._data):
            raise BadRecord("length", "the arrays run past the record's end")
        array = np.frombuffer(self._data, kind, count, self._at)
        self._at = end
        return array

    def strings(self, user_bytes: int, count: int) -> list[str]:
        lengths = self.take(np.uint16, count).tolist()
        at, names = self._at, []
        if at + user_bytes + sum(lengths) != len(self._data):
            raise BadRecord("length", "the strings do not fill the record")
        try:
            for length in (user_bytes, *lengths):
                names.append(self._data[at : at + length].decode())
                at += length
        except UnicodeDecodeError:
            raise BadRecord("length", "a string is not UTF-8") from None
        return names

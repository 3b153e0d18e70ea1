"""The inner layouts: round trips, the version before, and bytes that lie about themselves."""

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import BadRecord
from schemas.inference import (
    VERSION,
    Embeddings,
    FmRequest,
    decode_embeddings,
    decode_fm_request,
    encode_embeddings,
    encode_fm_request,
)

FIXTURES = Path(__file__).parent.parent / "fixtures" / "layouts"


def fm_request(items: int = 2, history: int = 3) -> FmRequest:
    return FmRequest(
        user="u-é",
        space=2**64 - 1,
        as_of=1_780_000_000_000,
        deadline_ms=30_000,
        events_offset=17,
        results_offset=5,
        items=[f"item{n}" for n in range(items)],
        p_asked=np.linspace(0, 1, items, dtype=np.float32),
        value=np.linspace(1, 2, items, dtype=np.float32),
        sources=np.arange(items, dtype=np.uint8),
        history_items=[f"seen {n} 🛒" for n in range(history)],
        history_types=np.arange(history, dtype=np.uint8),
        history_ts=np.arange(history, dtype=np.int64) + 1_779_000_000_000,
    )


def embeddings(items: int = 2, d: int = 4) -> Embeddings:
    codes = np.arange(1, items * d + 1, dtype=np.int64).reshape(items, d) % 127 + 1
    return Embeddings("u", 7, 1_780_000_000_000, 99, [f"i{n}" for n in range(items)], np.full(items, 0.5, np.float32),
                      codes.astype(np.int8))  # fmt: skip


def same(a: object, b: object) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in a.__slots__  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize(("items", "history"), [(0, 0), (1, 0), (2, 3), (40, 100)])
def test_fm_requests_round_trip(items: int, history: int) -> None:
    made = fm_request(items, history)
    assert same(made, decode_fm_request(encode_fm_request(made)))


@pytest.mark.parametrize(("items", "d"), [(0, 16), (1, 1), (3, 16), (50, 64)])
def test_embeddings_round_trip(items: int, d: int) -> None:
    made = embeddings(items, d)
    assert same(made, decode_embeddings(encode_embeddings(made)))


def test_committed_bytes_of_both_versions_are_read() -> None:
    """`fixtures/layouts` holds bytes written by versions 1 and 2; a reader accepts its own and the one before."""
    for version in (VERSION - 1, VERSION):
        request = decode_fm_request((FIXTURES / f"fm-request.v{version}.bin").read_bytes())
        vectors = decode_embeddings((FIXTURES / f"embeddings.v{version}.bin").read_bytes())
        assert (request.user, request.items, request.history_items[2]) == ("u-é", ["item0", "item1"], "seen 2 🛒")
        assert request.results_offset == (5 if version == 2 else -1)
        assert (vectors.user, vectors.items, vectors.codes.shape) == ("u", ["i0", "i1"], (2, 4))
        assert vectors.request_offset == (99 if version == 2 else -1)


def test_what_this_release_writes_is_what_is_committed() -> None:
    assert encode_fm_request(fm_request()) == (FIXTURES / f"fm-request.v{VERSION}.bin").read_bytes()
    assert encode_embeddings(embeddings()) == (FIXTURES / f"embeddings.v{VERSION}.bin").read_bytes()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: b"", "empty"),
        (lambda _: None, "empty"),
        (lambda _: b"{", "magic"),
        (lambda data: b"JSON" + data[4:], "magic"),
        (lambda data: data[:4] + bytes([VERSION + 1]) + data[5:], "version"),
        (lambda data: data[:4] + bytes([0]) + data[5:], "version"),
        (lambda data: data[:20], "length"),
        (lambda data: data[:-1], "length"),
        (lambda data: data + b"x", "length"),
        (lambda data: data[:6] + struct.pack("<H", 900) + data[8:], "length"),
        (lambda data: data[:6] + struct.pack("<H", 65535) + data[8:], "length"),
        (lambda data: data[:-1] + b"\xff", "length"),
    ],
)
def test_torn_records_name_their_reason(change, reason: str) -> None:  # type: ignore[no-untyped-def]
    for data, decode in (
        (encode_fm_request(fm_request()), decode_fm_request),
        (encode_embeddings(embeddings()), decode_embeddings),
    ):
        with pytest.raises(BadRecord) as caught:
            decode(change(data))
        assert caught.value.reason == reason


@pytest.mark.parametrize("scale", [np.nan, np.inf, 0.0, -1.0])
def test_vectors_that_are_no_vectors_are_refused(scale: float) -> None:
    made = embeddings()
    made.scales[0] = scale
    with pytest.raises(BadRecord, match="vector"):
        decode_embeddings(encode_embeddings(made))


def test_an_all_zero_vector_is_refused() -> None:
    made = embeddings()
    made.codes[1] = 0
    with pytest.raises(BadRecord, match="vector"):
        decode_embeddings(encode_embeddings(made))


@settings(max_examples=300)
@given(st.integers(0, 200), st.binary(min_size=1, max_size=4), st.booleans())
def test_flipped_bytes_never_raise_anything_else(at: int, junk: bytes, which: bool) -> None:
    data = bytearray(encode_fm_request(fm_request()) if which else encode_embeddings(embeddings()))
    at %= len(data)
    data[at : at + len(junk)] = junk[: len(data) - at]
    with contextlib.suppress(BadRecord):
        (decode_fm_request if which else decode_embeddings)(bytes(data))

"""Ids and keys: nothing is normalised, nothing meets by accident, and the partitioner is Java's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import BadRecord
from schemas.keys import ID_BYTES_MAX, murmur2, partition_of, prefixed, user_key, valid_id


def test_integers_become_their_decimal_string() -> None:
    assert valid_id(42, "user_id") == "42"
    assert valid_id(-7, "user_id") == "-7"


@pytest.mark.parametrize(
    ("value", "reason"),
    [("", "id_empty"), ("x" * 257, "id_long"), ("é" * 129, "id_long"), ("\ud800", "id_surrogate")],
)
def test_bad_ids_name_their_reason(value: str, reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        valid_id(value, "item_id")
    assert caught.value.reason == reason
    assert "item_id" in caught.value.sentence


@pytest.mark.parametrize("value", ["a", "x" * ID_BYTES_MAX, "é" * 128, " ", "\x00", "e\u0301", "a:b", "🛒"])
def test_good_ids_stay_as_they_are(value: str) -> None:
    assert valid_id(value, "user_id") == value


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_composite_keys_never_meet(a: str, b: str, c: str, d: str) -> None:
    if (a, b) != (c, d):
        assert prefixed(a.encode()) + prefixed(b.encode()) != prefixed(c.encode()) + prefixed(d.encode())


@given(st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=8))
def test_no_user_is_anothers_prefix(a: str, b: str) -> None:
    if a != b:
        assert not user_key(a).startswith(user_key(b))


@pytest.mark.parametrize(
    ("key", "expected"),
    # Vectors of the Java client's own test (org.apache.kafka.common.utils.UtilsTest), as unsigned 32 bits.
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_javas(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected % 2**32


def test_partition_is_in_range() -> None:
    assert {partition_of(str(user), 4) for user in range(100)} == {0, 1, 2, 3}

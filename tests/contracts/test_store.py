"""What every store must do, run over the one in memory and the one on RocksDB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.keys import prefixed, user_key
from streams.state.manifest import StateManifest
from streams.state.memory import MemoryStore
from streams.state.rocks import open_store
from streams.state.store import TABLES, Store, Transaction

TABLE = "pairs"


@pytest.fixture(params=["memory", "rocks"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened: Store = MemoryStore() if request.param == "memory" else open_store(tmp_path / "0", StateManifest(0, 7, {}))
    yield opened
    opened.close()


def write(store: Store, rows: Mapping[bytes, bytes | None], stamps: dict[str, int] | None = None) -> None:
    txn = Transaction(store)
    for key, value in rows.items():
        if value is None:
            txn.delete(TABLE, key)
        else:
            txn.put(TABLE, key, value)
    for topic, offset in (stamps or {}).items():
        txn.stamp(topic, offset)
    store.commit(txn)


def test_get_answers_in_the_order_asked(store: Store) -> None:
    write(store, {b"a": b"1", b"b": b"", b"\x00": b"2"})
    assert store.get(TABLE, [b"b", b"x", b"a", b"\x00", b"a"]) == [b"", None, b"1", b"2", b"1"]
    assert store.get(TABLE, []) == []


def test_tables_are_apart(store: Store) -> None:
    txn = Transaction(store)
    for number, table in enumerate(TABLES):
        txn.put(table, b"k", bytes((number,)))
    store.commit(txn)
    assert [store.get(table, [b"k"]) for table in TABLES] == [[bytes((number,))] for number in range(len(TABLES))]


def test_scan_finds_one_users_rows_in_key_order(store: Store) -> None:
    ends = (b"", b"y", b"z", b"\xff\xff")
    write(store, {user_key(user) + end: end for user in ("a", "a:b", "ab", "\xff" * 100) for end in ends[::-1]})
    for user in ("ab", "a", "\xff" * 100):
        prefix = user_key(user)
        assert store.scan(TABLE, [user_key("nobody"), prefix]) == [[], [(prefix + end, end) for end in ends]]
    assert store.scan(TABLE, []) == []


def test_a_prefix_ends_where_it_says(store: Store) -> None:
    keys = [
        b"\x00",
        b"\x00\x01",
        b"\x00\x01a",
        b"\x00\x01a\xff",
        b"\x00\x01b",
        b"\xfe",
        b"\xff",
        b"\xff\xff\xff",
        b"\x00\x02ab",
    ]
    write(store, dict.fromkeys(keys, b"."))
    for prefix in (b"", b"\x00", b"\x00\x01", b"\x00\x01a", b"\xff", b"\xff\xff", b"\xfe", b"\x01"):
        (found,) = store.scan(TABLE, [prefix])
        assert [key for key, _ in found] == sorted(key for key in keys if key.startswith(prefix)), prefix


def test_rows_go_on_after_a_key_and_are_a_snapshot(store: Store) -> None:
    write(store, {prefixed(bytes((i,))): b"old" for i in range(5)})
    snapshot = store.rows(TABLE)
    write(store, {prefixed(b"\x00"): None, prefixed(b"\x01"): b"new", prefixed(b"\x09"): b"new"})
    assert list(snapshot) == [(prefixed(bytes((i,))), b"old") for i in range(5)]
    assert [key for key, _ in store.rows(TABLE, after=prefixed(b"\x02"))] == [prefixed(bytes((i,))) for i in (3, 4, 9)]
    assert [key for key, _ in store.rows(TABLE, prefix=prefixed(b"\x03"), after=b"\x00")] == [prefixed(b"\x03")]
    assert list(store.rows(TABLE, prefix=b"\x00\x01", after=b"\xff")) == []


def test_deletes_are_real_and_need_no_row(store: Store) -> None:
    key = user_key("u") + b"i"
    write(store, {key: b"1", b"\x00": b"2"})
    write(store, {key: None, b"never": None})
    assert store.get(TABLE, [key, b"never"]) == [None, None]
    assert store.scan(TABLE, [user_key("u")]) == [[]]
    assert list(store.rows(TABLE)) == [(b"\x00", b"2")]
    write(store, {key: b"3"})
    assert store.scan(TABLE, [user_key("u")]) == [[(key, b"3")]]


def test_stamps_come_with_the_rows(store: Store) -> None:
    assert (store.stamp("events"), store.stamps()) == (None, {})
    write(store, {b"a": b"1"}, {"events": 10, "embeddings": 2**40})
    write(store, {}, {"events": 11})
    assert store.stamps() == {"events": 11, "embeddings": 2**40}
    assert store.stamp("events") == 11


def test_nothing_shows_before_commit(store: Store) -> None:
    write(store, {b"a": b"1"}, {"events": 1})
    txn = Transaction(store)
    txn.put(TABLE, b"a", b"2")
    txn.delete(TABLE, b"b")
    txn.stamp("events", 2)
    assert store.get(TABLE, [b"a"]) == [b"1"]
    assert store.stamp("events") == 1


def test_a_transaction_sees_its_own_writes(store: Store) -> None:
    u = user_key("u")
    write(store, {u + b"1": b"old", u + b"2": b"old", u + b"3": b"old"})
    txn = Transaction(store)
    txn.put(TABLE, u + b"2", b"new")
    txn.put(TABLE, u + b"0", b"new")
    txn.delete(TABLE, u + b"3")
    assert txn.get(TABLE, [u + b"3", u + b"2", u + b"1", u + b"x"]) == [None, b"new", b"old", None]
    assert txn.scan(TABLE, [u, user_key("v")]) == [[(u + b"0", b"new"), (u + b"1", b"old"), (u + b"2", b"new")], []]
    assert txn.get("history", [u + b"2"]) == [None]


def test_our_own_mistakes_are_refused_before_they_are_written(store: Store) -> None:
    first, second = Transaction(store), Transaction(store)
    first.stamp("events", 5)
    store.commit(first)
    second.put(TABLE, b"a", b"lost update")
    with pytest.raises(AssertionError, match="another transaction was committed"):
        store.commit(second)
    with pytest.raises(AssertionError, match="committed before"):
        store.commit(first)
    back = Transaction(store)
    back.put(TABLE, b"a", b"x")
    back.stamp("events", 4)
    with pytest.raises(AssertionError, match="go back from 5 to 4"):
        store.commit(back)
    assert store.get(TABLE, [b"a"]) == [None]


def test_close_twice(store: Store) -> None:
    store.close()
    store.close()


parts = st.sampled_from([prefixed(b"u"), prefixed(b"u1"), prefixed(b""), b"", b"\x00", b"\xff"])
keys = st.builds(lambda part, rest: part + rest or b"k", parts, st.binary(max_size=2))
steps = st.lists(st.tuples(keys, st.none() | st.binary(max_size=3), st.booleans()), max_size=30)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, st.lists(keys, max_size=4))
def test_any_writes_read_as_a_dictionary_would(
    store: Store, steps: list[tuple[bytes, bytes | None, bool]], asked: list[bytes]
) -> None:
    write(store, {key: None for key, _ in store.rows(TABLE)})
    model: dict[bytes, bytes] = {}
    txn = Transaction(store)
    for key, value, commit in steps:
        if value is None:
            txn.delete(TABLE, key)
            model.pop(key, None)
        else:
            txn.put(TABLE, key, value)
            model[key] = value
        assert txn.get(TABLE, asked) == [model.get(key) for key in asked]
        assert txn.scan(TABLE, asked) == [
            sorted(row for row in model.items() if row[0].startswith(key)) for key in asked
        ]
        if commit:
            store.commit(txn)
            assert list(store.rows(TABLE)) == sorted(model.items())
            txn = Transaction(store)

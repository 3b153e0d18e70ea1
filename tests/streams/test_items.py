"""The item index: dense rows, columns from the catalogue, and sweeps that keep to their bound."""

from __future__ import annotations

import numpy as np
import pytest

from schemas.events import Item
from schemas.keys import hash64
from streams.items import CATEGORY_UNKNOWN, ItemIndex


def test_a_row_each_and_the_same_again() -> None:
    index = ItemIndex(item_buckets=97)
    rows = index.intern(["a", "b", "a", "ü"])
    assert rows.dtype == np.int32
    assert len(set(rows.tolist())) == 3
    assert index.intern(["ü", "b", "a"]).tolist() == [rows[3], rows[1], rows[0]]
    assert index.bucket[rows].tolist() == [hash64(name) % 97 for name in ("a", "b", "a", "ü")]
    assert index.intern([]).shape == (0,)


def test_the_catalogue_by_row() -> None:
    index = ItemIndex(category_buckets=10, content_dims=2)
    index.update([("a", Item("a", category=5, content=[1.0, 2.0])), ("b", Item("b", content=[1.0]))])
    a, b, c = index.intern(["a", "b", "c"])
    assert index.category[[a, b, c]].tolist() == [1 + hash64("5") % 9, CATEGORY_UNKNOWN, CATEGORY_UNKNOWN]
    assert index.content[[a, b]].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert index.content_refused == 1
    index.update([("a", Item("a", category="x")), ("a", None)])
    assert (index.category[a], index.content[a].tolist()) == (CATEGORY_UNKNOWN, [0.0, 0.0])


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_it_stays_within_its_bound_and_drops_the_least_recent(chunk: int) -> None:
    index = ItemIndex(items_max=100)
    names = [f"i{i}" for i in range(1000)]
    for start in range(0, 1000, chunk):
        index.intern(["always", *names[start : start + chunk]])
        assert len(index) <= 100
        assert all(index.names[row] == name for name, row in index._rows.items())
    assert index.swept == 1001 - len(index)
    (serial,) = index.serial[index.intern(["always"])]
    assert serial == 1, "the row in constant use was swept"
    assert set(names[-40:]) <= set(index._rows), "recent ids went before older ones"


def test_a_swept_row_gets_a_new_serial_and_no_old_facts() -> None:
    index = ItemIndex(items_max=4)
    index.update([("a", Item("a", category="x"))])
    row = int(index.intern(["a"])[0])
    serials = {int(index.serial[row])}
    for i in range(40):
        index.update([(f"b{i}", None)])
        index.update([(f"c{i}", Item(f"c{i}", category="y"))])
    again = int(index.intern(["a"])[0])
    assert int(index.serial[again]) not in serials
    assert index.category[again] == CATEGORY_UNKNOWN
    assert index.catalogued_swept > 0


def test_ids_without_a_catalogue_entry_go_first() -> None:
    index = ItemIndex(items_max=10)
    index.update([(f"c{i}", Item(f"c{i}", category="x")) for i in range(5)])
    for i in range(100):
        index.intern([f"n{i}"])
    assert {f"c{i}" for i in range(5)} <= set(index._rows)
    assert index.catalogued_swept == 0


def test_a_batch_larger_than_the_bound_is_served_and_swept_later() -> None:
    index = ItemIndex(items_max=10)
    names = [f"i{i}" for i in range(25)]
    assert len(set(index.intern(names).tolist())) == 25
    index.intern(["one more"])
    assert len(index) <= 10

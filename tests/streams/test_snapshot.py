"""The FM's history: both kinds in one row of time, and what training saw is what an FM request holds."""

from __future__ import annotations

import numpy as np

from schemas.events import IMPRESSION_CODE, type_code
from streams.history import HistoryRow
from streams.snapshot import snapshot


def row(*entries: tuple[str, str, int, int]) -> HistoryRow:
    items, kinds, ts, offsets = zip(*entries, strict=True) if entries else ((), (), (), ())
    codes = np.array([type_code(kind) for kind in kinds], np.uint8)
    return HistoryRow(list(items), codes, np.array(ts, np.int64), np.array(offsets, np.int64))


def test_both_kinds_come_in_the_order_of_time_then_of_the_log() -> None:
    done = row(("a", "click", 5, 3), ("b", "cart", 9, 7))
    shown = row(("a", "impression", 5, 2), ("c", "impression", 5, 4), ("d", "impression", 9, 8))
    both = snapshot(done, shown)
    assert both.items == ["a", "a", "c", "b", "d"]
    assert both.offsets.tolist() == [2, 3, 4, 7, 8]
    assert both.ts.tolist() == [5, 5, 5, 9, 9]
    assert (both.types == IMPRESSION_CODE).tolist() == [True, False, True, False, True]


def test_either_may_be_empty() -> None:
    done, shown = row(("a", "click", 5, 3)), row(("c", "impression", 4, 1))
    assert snapshot(done, row()).items == ["a"]
    assert snapshot(row(), shown).items == ["c"]
    assert len(snapshot(row(), row())) == 0

"""Where candidates come from: each source on its own, their union against a loop, and bounds that hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.features import F32, I32
from schemas.events import Item
from schemas.inference import SOURCES
from schemas.keys import hash64
from streams.asked import PAIR_FEATURES
from streams.candidates import Candidates, Named, distinct, rank_in_group
from streams.covisit import Covisits
from streams.history import HistoryRow
from streams.items import ItemIndex
from streams.predict import PredictConfig, Predictor
from streams.similar import Similar
from streams.sources import Decayed, ItemTable
from tests.oracles import speculate as oracle

NOW, MINUTE, HOUR = 1_700_000_000_000, 60_000, 3_600_000


class Space:
    """Items on a circle by number: the nearest of item k are k ± 1, k ± 2 …"""

    def __init__(self, index: ItemIndex, items: int) -> None:
        self.index, self.items = index, items

    def item_vectors(self, bucket: I32, category: I32, content: F32) -> F32:
        assert len(bucket) == len(category) == len(content)
        angle = 2 * np.pi * content[:, 0] / self.items
        return np.stack((np.cos(angle), np.sin(angle)), axis=1).astype(np.float32)


def world(items: int = 60, config: PredictConfig | None = None) -> Predictor:
    index = ItemIndex(content_dims=1)
    index.update([(f"i{k}", Item(f"i{k}", f"c{k % 5}", [float(k)])) for k in range(items)])
    config = config or PredictConfig()
    return Predictor(
        config, ItemTable(index, config.items_max, config.popular_max, config.category_max), Space(index, items), 1
    )


def history(*rows: tuple[int, int]) -> HistoryRow:
    """(item, minutes ago), newest last."""
    n = len(rows)
    ts = np.array([NOW - minutes * MINUTE for _, minutes in rows], np.int64)
    return HistoryRow([f"i{item}" for item, _ in rows], np.full(n, 3, np.uint8), ts, np.arange(n) + 10)


def predict(
    one: Predictor, past: HistoryRow, shown: HistoryRow, full: bool = True, missed: tuple[int, ...] = ()
) -> tuple[dict[str, set[str]], Candidates]:
    """Source → items named by it, for one user."""
    slots = one.table.intern([f"i{item}" for item in missed], NOW)
    users = np.array([hash64("u")], np.uint64)
    pasts = one.join([past], NOW), one.join([shown], NOW)
    one.begin(NOW)
    found = one.candidates(users, *pasts, np.array([full]), (np.zeros(len(slots), np.int64), slots), NOW)
    named = {
        source: {
            one.table.names[slot] for slot, bits in zip(found.slot, found.sources, strict=True) if bits >> code & 1
        }
        for code, source in enumerate(SOURCES)
    }
    return named, found


def touched(one: Predictor, *counts: tuple[int, int]) -> None:
    """(item, times)."""
    names = [f"i{item}" for item, times in counts for _ in range(times)]
    one.table.touch(one.table.intern(names, NOW), np.full(len(names), NOW))


def column(found: Candidates, one: Predictor, item: int, name: str) -> float:
    at = np.flatnonzero(found.slot == one.table.intern([f"i{item}"], NOW)[0])[0]
    return float(found.pair[at, PAIR_FEATURES.index(name)])


def test_each_source_names_what_it_should() -> None:
    one = world()
    touched(one, (7, 9), (12, 5), (3, 4), (40, 1))
    a, b = one.table.intern(["i1", "i33"], NOW)
    one.covisits.learn(np.array([a]), np.array([b]), np.array([NOW]))
    one.table.intern([f"i{k}" for k in range(60)], NOW)
    named, found = predict(one, history((2, 500), (1, 5)), history((20, 3)), missed=(50,))
    assert named["reactive"] == {"i50"}
    assert named["revisit"] == {"i1", "i2", "i20"}
    assert named["covisit"] == {"i33"}
    assert {"i7", "i12", "i3", "i40"} <= named["popular"]
    assert named["category"] == {"i7", "i12"}  # of the categories of i1 and i2, what somebody touched
    assert {"i0", "i2", "i3", "i59"} <= named["similar"]
    assert column(found, one, 12, "sources") == 2
    assert column(found, one, 33, "covisit") == pytest.approx(1.0)


def test_reactive_alone_is_reactive_alone() -> None:
    one = world(config=PredictConfig(sources=("reactive",)))
    touched(one, (7, 9))
    named, found = predict(one, history((2, 500), (1, 5)), history((20, 3)), missed=(50, 2))
    assert named["reactive"] == {"i50", "i2"}
    assert len(found) == 2
    assert column(found, one, 2, "touched_log") == pytest.approx(np.log(2))


def test_a_user_that_is_not_due_gets_the_missed_pairs_only() -> None:
    named, found = predict(world(), history((2, 500)), history(), full=False, missed=(50,))
    assert named["reactive"] == {"i50"}
    assert len(found) == 1


def test_the_pairs_columns() -> None:
    one = world()
    users, names = np.array([hash64("u")], np.uint64), one.table.intern(["i2", "i2"], NOW)
    one.demand(users, np.zeros(2, np.int64), names, np.array([NOW - 2 * HOUR, NOW - HOUR]))
    _, found = predict(one, history((2, 480), (1, 90), (2, 60)), history((2, 30), (1, 10)))
    assert column(found, one, 2, "touched_1h") == pytest.approx(np.exp(-1))
    assert column(found, one, 2, "touched_8h") == pytest.approx(np.exp(-1 / 8))
    assert column(found, one, 2, "touched_log") == pytest.approx(np.log(3))
    assert column(found, one, 2, "shown_1h") == pytest.approx(np.exp(-0.5))
    assert column(found, one, 2, "asked_1h") == pytest.approx(np.exp(-1))
    count = np.exp(-1 / 24) + np.exp(-2 / 24)
    assert column(found, one, 2, "asked_log") == pytest.approx(np.log1p(count))
    assert found.user[0, 1] == pytest.approx(np.log1p(count))  # asks_day
    assert 0.6 < column(found, one, 2, "category_share") < 0.7
    assert column(found, one, 1, "asked_log") == 0


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 63)), max_size=20),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=100, deadline=None)
def test_distinct_is_what_a_dictionary_says(parts: list[list[tuple[int, int, int]]]) -> None:
    named = [
        Named(
            *(np.array([row[at] for row in part], kind) for at, kind in ((0, np.int64), (1, np.int32), (2, np.uint8)))
        )
        for part in parts
    ]
    owner, slot, bits, group = distinct(named)
    wanted = oracle.distinct([([r[0] for r in p], [r[1] for r in p], [r[2] for r in p]) for p in parts])
    pairs = list(zip(owner.tolist(), slot.tolist(), strict=True))
    assert dict(zip(pairs, bits.tolist(), strict=True)) == wanted
    assert pairs == sorted(wanted)
    flat = [(row[0], row[1]) for part in parts for row in part]
    assert [pairs[at] if at >= 0 else None for at in group.tolist()] == [
        pair if pair in wanted else None for pair in flat
    ]


def test_rank_in_group() -> None:
    assert rank_in_group(np.array([4, 4, 4, 1, 1, 9])).tolist() == [0, 1, 2, 0, 1, 0]
    assert rank_in_group(np.zeros(0, np.int64)).tolist() == []


def test_covisits_are_learned_once_from_the_history() -> None:
    one, users = world(), np.array([hash64("u")], np.uint64)
    one.due(users, NOW)
    past = one.join([history((1, 9), (2, 8), (3, 7))], NOW)
    one.learn(past, users, 0)
    once = one.covisits.totals.copy()
    assert once.any()
    for _ in range(2):
        one.learn(past, users, 0)
    assert (one.covisits.totals == once).all()
    slots = one.table.intern(["i1", "i2", "i3"], NOW)
    neighbors, shares = one.covisits.read(slots)
    assert set(neighbors[0][neighbors[0] >= 0]) == {slots[1], slots[2]}
    assert one.covisits.totals[slots] == pytest.approx(
        one.covisits.totals[slots[0]] * np.array([1, 4 / 3, 1]), rel=1e-3
    )
    assert shares[0].sum() == pytest.approx(1.0)


def test_covisits_before_our_time_are_left_alone() -> None:
    one, users = world(), np.array([hash64("u")], np.uint64)
    one.due(users, NOW)
    one.learn(one.join([history((1, 9), (2, 8))], NOW), users, floor=12)
    assert not one.covisits.totals.any()


def test_a_neighbour_that_returns_outlives_those_that_do_not() -> None:
    covisits, rng = Covisits(4), np.random.default_rng(0)
    for step in range(400):
        other = 1 + step % 2 if step % 4 < 2 else int(rng.integers(100, 2_000))
        covisits.learn(np.array([0]), np.array([other]), np.array([NOW + step]))
    neighbors, shares = covisits.read(np.array([0]))
    assert {1, 2} <= set(neighbors[0].tolist())
    assert shares[0][neighbors[0] == 1] == pytest.approx(0.25, abs=0.01)
    assert covisits.neighbors.shape[1] == 4


def test_decayed_counts_do_not_depend_on_the_order_or_the_age_of_the_table() -> None:
    rng, ts = np.random.default_rng(1), NOW + np.arange(0, 400 * HOUR, HOUR)
    rows = rng.integers(0, 3, len(ts))
    forward, shuffled = Decayed(4 * HOUR), Decayed(4 * HOUR)
    for one, order in ((forward, np.arange(len(ts))), (shuffled, rng.permutation(len(ts)))):
        one.grow(3)
        for part in np.array_split(order, 50):
            one.add(rows[part], ts[part])
    wanted = [np.exp(-(ts[-1] - ts[rows == row]) / (4 * HOUR)).sum() for row in range(3)]
    for one in (forward, shuffled):
        assert one.read(np.arange(3), int(ts[-1])) == pytest.approx(wanted, rel=1e-6)


def test_similar_items_by_index_are_those_of_an_exact_search() -> None:
    index, n = ItemIndex(content_dims=1), 1_500
    index.update([(f"i{k}", Item(f"i{k}", "c", [float(k)])) for k in range(n)])
    table = ItemTable(index, n, 1, 1)
    slots = table.intern([f"i{k}" for k in range(n)], NOW)
    answers = []
    for exact_items_max in (5_000, 100):
        similar = Similar(Space(index, n), table, 6, exact_items_max, 64, seed=1)
        assert similar.refresh_if_due()
        assert not similar.refresh_if_due()
        answers.append(similar.read(slots)[0])
    wanted = [{(k + step) % n for step in (-3, -2, -1, 1, 2, 3)} for k in range(n)]
    assert [set(row) for row in answers[0].tolist()] == wanted
    found = sum(len(set(row) & want) for row, want in zip(answers[1].tolist(), wanted, strict=True))
    assert found / (6 * n) > 0.95


def test_vectors_that_are_not_finite_or_zero_are_nobodys_neighbours() -> None:
    class Broken(Space):
        def item_vectors(self, bucket: I32, category: I32, content: F32) -> F32:
            vectors = super().item_vectors(bucket, category, content)
            vectors[3], vectors[4] = np.nan, 0.0
            return vectors

    one = world(10)
    slots = one.table.intern([f"i{k}" for k in range(10)], NOW)
    similar = Similar(Broken(one.table.items, 10), one.table, 20, 100, 1, seed=1)
    similar.refresh_if_due()
    neighbors, cosines = similar.read(slots)
    assert not np.isin(neighbors, slots[[3, 4]]).any()
    assert (neighbors[[3, 4]] == -1).all()
    assert (neighbors[0] >= 0).sum() == 7
    assert np.isfinite(cosines).all()


def test_a_sweep_keeps_the_used_and_everything_follows_it() -> None:
    one = world(config=PredictConfig(items_max=40))
    names = [f"i{k}" for k in range(50)]
    slots = one.table.intern(names, NOW)
    one.table.touch(slots[20:], np.full(30, NOW + MINUTE))
    one.covisits.learn(slots[[30, 30]], slots[[31, 2]], np.full(2, NOW))
    one.begin(NOW + MINUTE)
    assert len(one.table) == 30
    again = one.table.intern(["i30", "i31"], NOW)
    neighbors, _ = one.covisits.read(again[:1])
    assert set(neighbors[0].tolist()) == {-1, int(again[1])}
    assert one.table.hash[again].tolist() == [hash64("i30"), hash64("i31")]
    assert one.table.touched_day.read(again, NOW + MINUTE) == pytest.approx([1, 1])


def test_items_that_no_catalogue_knows_are_taken_while_the_index_grows() -> None:
    table = ItemTable(ItemIndex(), 10_000, 1, 1)
    for first in range(0, 6_000, 1_500):
        slots = table.intern([f"i{item}" for item in range(first, first + 1_500)], NOW)
        assert slots.tolist() == list(range(first, first + 1_500))
    table.items.intern([f"other{item}" for item in range(5_000)])
    table.touch(slots, np.full(len(slots), NOW))
    assert not table.category[: len(table)].any()

"""Generations of the neighbour index: equal to the oracle, functions of the rows, never fewer answers than live users."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.ranker import Ranker, RankerConfig
from streams.aggregate import Means
from streams.neighbors import Generation, Neighbors, NeighborsConfig, user_vectors
from streams.serve import Serve
from streams.state.memory import MemoryStore
from tests.oracles.neighbors import nearest_mean
from tests.streams.fakes import FakeRanker, item_index
from tests.streams.serving import HOUR, NAMES, NOW, D, events, request, serve, vectors

DAY = 24 * HOUR


def _generation(users: int, seed: int = 0, name: tuple[int, int] = (1, 1)) -> Generation:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((users, 3)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    values = rng.standard_normal((users, D)).astype(np.float32)
    return Generation(name, keys, Means(values, np.ones(users, np.int64), NOW - rng.integers(0, 2 * DAY, users)), None)


def _neighbors(generation: Generation | None, k: int = 10) -> Neighbors:
    neighbors = Neighbors(NeighborsConfig(k=k), D, DAY)
    assert neighbors.install(generation)
    return neighbors


@pytest.mark.parametrize("users", [0, 1, 3, 10, 11, 200])
def test_exact_search_equals_the_oracle(users: int) -> None:
    generation = _generation(users)
    queries = np.random.default_rng(1).standard_normal((20, 3)).astype(np.float32)
    said = _neighbors(generation).ask(queries, np.full(20, NOW))
    table = list(
        zip(generation.keys.tolist(), generation.means.mean.tolist(), generation.means.newest_ms.tolist(), strict=True)
    )
    for at, query in enumerate(queries.tolist()):
        expected = nearest_mean(query, table, 10, NOW, DAY) if users else None
        assert (said.age_ms[at] >= 0) == (expected is not None)
        if expected is not None:
            np.testing.assert_allclose(said.vector[at], expected[0], rtol=1e-4, atol=1e-5)
            assert said.age_ms[at] == pytest.approx(expected[1], rel=1e-4)
        else:
            assert not said.vector[at].any()


def test_equal_users_are_taken_in_key_order() -> None:
    keys = np.tile(np.array([[1.0, 0.0, 0.0]], np.float32), (6, 1))
    values = np.repeat(np.arange(6, dtype=np.float32)[:, None], D, 1)
    generation = Generation((1, 1), keys, Means(values, np.ones(6, np.int64), np.full(6, NOW)), None)
    said = _neighbors(generation, k=3).ask(keys[:1], np.array([NOW]))
    assert said.vector[0].tolist() == [1.0] * D  # the mean of users 0, 1, 2


@pytest.mark.parametrize("bad", [[0.0, 0.0, 0.0], [np.nan, 1.0, 0.0], [np.inf, 0.0, 0.0]])
def test_a_query_that_is_no_direction_gets_no_answer(bad: list[float]) -> None:
    queries = np.array([bad, [1.0, 2.0, 3.0]], np.float32)
    said = _neighbors(_generation(30)).ask(queries, np.full(2, NOW))
    assert said.age_ms[0] == -1
    assert said.age_ms[1] >= 0
    assert np.isfinite(said.vector).all()


def test_without_a_generation_there_is_no_answer() -> None:
    said = _neighbors(None).ask(np.ones((2, 3), np.float32), np.full(2, NOW))
    assert said.age_ms.tolist() == [-1, -1]


def test_a_neighbour_leaves_with_the_window() -> None:
    generation = _generation(1)
    newest = int(generation.means.newest_ms[0])
    neighbors = _neighbors(generation)
    ages = neighbors.ask(
        np.repeat(generation.keys, 3, 0), np.array([newest + DAY - 1, newest + DAY, newest - 5])
    ).age_ms
    assert ages.tolist() == [DAY - 1, -1, 0]


def test_torn_and_older_generations_are_refused() -> None:
    good = _generation(5, name=(5, 5))
    neighbors = _neighbors(good)
    torn = replace(good, keys=good.keys[:3], name=(6, 6))
    other = replace(
        good, means=Means(np.zeros((5, D + 1), np.float32), good.means.count, good.means.newest_ms), name=(6, 6)
    )
    for bad in (torn, other, _generation(5, name=(4, 9))):
        assert not neighbors.install(bad)
    assert neighbors.generation is good
    assert neighbors.refused == 3
    assert neighbors.install(_generation(5, name=(5, 6)))


def test_the_graph_finds_what_exact_search_finds_and_repeats_itself() -> None:
    partition = _crowd(600, exact_users_max=100)
    one, two = partition.generation(), partition.generation()
    assert one.graph is not None
    exact = replace(one, graph=None)
    queries = np.random.default_rng(4).standard_normal((50, 3)).astype(np.float32)
    answers = [_neighbors(generation).ask(queries, np.full(50, NOW)) for generation in (one, two, exact)]
    assert answers[0].vector.tobytes() == answers[1].vector.tobytes()
    assert np.isclose(answers[0].vector, answers[2].vector, atol=1e-5).all(axis=1).mean() > 0.9
    few = _neighbors(one, k=10_000).ask(queries[:1], np.array([NOW]))  # k is cut to the users there are
    assert few.age_ms[0] >= 0


def _crowd(users: int, exact_users_max: int = 20_000) -> Serve:
    partition = serve(neighbors_exact_users_max=exact_users_max)
    rng = np.random.default_rng(2)
    rows = [
        (f"u{n}", NAMES[rng.integers(200)], "click", NOW - int(rng.integers(HOUR)))
        for n in range(users)
        for _ in range(3)
    ]
    partition.events(events(*rows), len(rows))
    partition.embeddings([vectors(f"u{n}", ["i1"], NOW - 2 * HOUR, value=n % 100 + 1) for n in range(users)], users)
    return partition


def test_a_cut_is_a_function_of_the_rows_at_its_offsets() -> None:
    partition, other = _crowd(40), _crowd(40)
    cut = partition.cut()
    assert partition.step(cut) is False
    later = other.cut()
    other.events(events(("u1", "i9", "click", NOW + HOUR), first=120), 121)  # folded after the cut: it must not show
    other.embeddings([vectors("u0", ["i9"], NOW, value=99), vectors("new", ["i9"], NOW)], 42)
    while later.step(other.ranker, other.index, users_max=7):
        pass
    one, two = cut.finish(), later.finish()
    assert one.name == two.name == (120, 40)
    assert one.keys.tobytes() == two.keys.tobytes()
    assert one.means.mean.tobytes() == two.means.mean.tobytes()
    assert len(one.keys) == 40


def test_users_without_history_or_mean_are_not_in_the_index() -> None:
    partition = serve()
    partition.events(
        events(("both", "i1", "click", NOW), ("history", "i1", "click", NOW), ("old", "i1", "click", NOW)), 3
    )
    partition.embeddings(
        [vectors("both", ["i1"], NOW), vectors("vectors", ["i1"], NOW), vectors("old", ["i1"], NOW - 2 * DAY)], 3
    )
    partition.embeddings([vectors("history", ["i1"], NOW, space=1)], 4)
    assert len(partition.generation().keys) == 1
    assert len(serve().generation().keys) == 0


def test_cuts_are_due_by_records() -> None:
    partition = serve(generation_records=3)
    due = []
    for number in range(5):
        partition.embeddings([vectors("u", ["i1"], NOW + number)], number + 1)
        due.append(partition.cut_due())
    assert due == [False, False, True, True, True]
    partition.cut()
    assert not partition.cut_due()
    assert not serve(generation_records=0).cut_due()


def test_a_restarted_partition_cuts_at_once() -> None:
    store = MemoryStore()
    serve(store=store, generation_records=3).embeddings([vectors("u", ["i1"], NOW)], 1)
    assert serve(store=store, generation_records=3).cut_due()
    assert not serve(store=store, generation_records=0).cut_due()
    assert not serve(generation_records=3).cut_due()


def test_user_vectors_are_means_of_the_newest_rows() -> None:
    partition = serve()
    partition.events(
        events(*[("u", NAMES[n], "click", NOW + n) for n in range(20)], ("short", NAMES[4], "click", NOW)), 21
    )
    items, ranker = item_index(NAMES), FakeRanker()
    rows = items.intern(NAMES[4:20])
    of_items = ranker.item_vectors(items.bucket[rows], items.category[rows], items.content[rows])
    histories = partition.tables.history.read(partition.store, ["nobody", "u", "short"])
    vectors_of = user_vectors(histories, ranker, items)
    np.testing.assert_allclose(vectors_of[1], of_items.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(vectors_of[2], of_items[0], rtol=1e-6)
    assert not vectors_of[0].any()


def test_a_users_key_does_not_depend_on_its_company() -> None:
    partition = _crowd(40)
    ranker = Ranker.untrained(RankerConfig(d=D, content_dims=4, item_buckets=64, user_buckets=64), seed=1)
    histories = partition.tables.history.read(partition.store, [f"u{n}" for n in range(40)])
    together = user_vectors(histories, ranker, partition.index)
    alone = [user_vectors([history], ranker, partition.index) for history in histories]
    assert together.tobytes() == np.concatenate(alone).tobytes()


def test_only_a_user_without_a_mean_asks_neighbours() -> None:
    partition, ages = _crowd(5), list[list[int]]()
    partition.install(partition.generation())
    partition.events(events(("lonely", NAMES[0], "click", NOW), first=15), 16)
    partition.observer = lambda _asked, scored: ages.append(scored.found.vectors.neighbor_age_ms.tolist())
    own, lent = partition.rank([request("r", "u1", ["i50"]), request("r", "lonely", ["i50"])])
    assert (own.items[0].tier, lent.items[0].tier) == ("user", "neighbor")
    assert ages == [[-1, 2 * HOUR]]

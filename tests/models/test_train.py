"""Training: seeded, in time order, and worth it: where long history matters the FM beats the ranker, and hands it its vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.compressor import CompressorConfig
from models.evaluate import auc, evaluate
from models.features import Features, Vectors, no_vectors, take_requests
from models.fit import Schedule, epoch_batches, split_tail
from models.foundation import ITEM_TABLES, FmConfig, FoundationModel
from models.ranker import Ranker, RankerConfig
from models.rows import FmRows, Groups
from models.train import (
    FmTraining,
    RankerTraining,
    drop_vectors,
    fit_compressor,
    foundation_outputs,
    train_foundation,
    train_ranker,
)
from tests.models.made_up import features_of, tiny_world

FM = FmConfig(item_buckets=128, category_buckets=4, width=16, hidden=64, dims=32, head_hidden=16)
VM = RankerConfig(d=8, item_buckets=128, category_buckets=4, user_buckets=4096)


def part(rows: FmRows, features: Features, first: int, last: int) -> tuple[FmRows, Features]:
    """The requests [first, last) of both."""
    taken, _, pairs = take_requests(features, no_vectors(len(rows.item), len(rows.ts), 8), np.arange(first, last))
    mine = slice(first, last)
    return replace(
        rows,
        ts=rows.ts[mine],
        history_item=rows.history_item[mine],
        history_type=rows.history_type[mine],
        history_age_ms=rows.history_age_ms[mine],
        request=taken.request,
        item=rows.item[pairs],
        labels=rows.labels[pairs],
        context=rows.context[pairs],
    ), taken


def test_the_fm_beats_the_ranker_where_long_history_matters_and_hands_it_over() -> None:
    rows, features = tiny_world(1)
    r = len(rows.ts)
    (before, seen), (after, asked) = part(rows, features, 0, r * 4 // 5), part(rows, features, r * 4 // 5, r)
    patient = Schedule(epochs=8, batch=128, rate=1e-2, checks=1, patience=8)
    fm, report = train_foundation(before, FM, 1, FmTraining(patient, stale_share=0.2))
    old, new = foundation_outputs(fm, before)[0], foundation_outputs(fm, after)
    compressor, _ = fit_compressor(old, CompressorConfig(dims=FM.dims, d=8), seed=1)

    def vectors(fm_vectors: np.ndarray, requests: int, hit: np.ndarray) -> Vectors:
        exact = compressor.decode(*compressor.encode(fm_vectors))
        return replace(no_vectors(len(exact), requests, 8), exact=exact, exact_age_ms=np.where(hit, 0, -1))

    training = RankerTraining(patient)
    labels, half = before.labels[:, 0], np.random.default_rng(1).random(len(before.item)) < 0.5
    base, _ = train_ranker(seen, None, labels, replace(VM, vectors=False), 1, training)
    ranker, _ = train_ranker(seen, vectors(old, len(before.ts), half), labels, VM, 1, training)
    everything = vectors(new[0], len(after.ts), np.ones(len(after.item), np.bool_))
    wanted = after.labels[:, 0]
    table = {
        "base": evaluate(base.score_many(asked), wanted),
        "ranker, no vector": evaluate(ranker.score_many(asked), wanted),
        "ranker, exact vectors": evaluate(ranker.score_many(asked, everything), wanted),
        "foundation model": evaluate(new[1][:, 0], wanted),
    }
    ne = {name: round(figures.ne, 3) for name, figures in table.items()}
    assert report.validation.ne < 0.9, report
    assert ne["foundation model"] < ne["base"] - 0.1, ne
    assert ne["ranker, exact vectors"] < ne["base"] - 0.08, ne
    assert ne["ranker, no vector"] < ne["base"] + 0.06, ne  # an outage of the FM costs little
    assert table["ranker, exact vectors"].ece < 0.08


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_same_seed_gives_the_same_bytes_and_no_global_state_is_touched() -> None:
    rows, features = tiny_world(2, users=40)
    short = Schedule(epochs=1, batch=256)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()

    def states(seed: int) -> list[bytes]:
        fm, _ = train_foundation(rows, FM, seed, FmTraining(short))
        vm, _ = train_ranker(features, None, rows.labels[:, 0], VM, seed, RankerTraining(short))
        return [value.tobytes() for model in (fm, vm) for _, value in sorted(model.state().items())]

    one, again, other = states(1), states(1), states(2)
    assert one == again
    assert one != other
    assert torch.equal(torch_state, torch.get_rng_state())
    assert all(np.array_equal(a, b) for a, b in zip(numpy_state, np.random.get_state(), strict=True))
    assert torch.get_num_threads() == 2


def test_the_tail_is_not_trained_on() -> None:
    rows, features = tiny_world(3, users=20)
    unknown = rows.labels.copy()
    unknown[int(rows.starts[split_tail(len(rows.ts), 0.1)]) :] = (
        np.nan
    )  # nothing to choose by: the last weights are kept
    once = Schedule(epochs=1, batch=256, checks=1)  # one look, at the end
    rankers = [train_ranker(features, None, y[:, 0], VM, 1, RankerTraining(once)) for y in (rows.labels, unknown)]
    models = [train_foundation(replace(rows, labels=y), FM, 1, FmTraining(once)) for y in (rows.labels, unknown)]
    for (known, report), (blind, other) in (rankers, models):
        assert report.best_step == other.best_step == report.steps > 0
        assert all(np.array_equal(known.state()[name], value) for name, value in blind.state().items())
        assert (report.validation.rows, other.validation.rows) == (len(rows.item) - report.rows, 0)


def test_a_warm_start_begins_where_the_old_one_stopped() -> None:
    rows, features = tiny_world(4, users=20)
    old = Ranker.untrained(VM, 7)
    ranker, report = train_ranker(
        features, None, rows.labels[:, 0], VM, 1, RankerTraining(Schedule(epochs=0)), init=old
    )
    assert all(np.array_equal(ranker.state()[name], value) for name, value in old.state().items())
    fm = FoundationModel.untrained(FM, 7)
    kept, _ = train_foundation(rows, FM, 1, FmTraining(Schedule(epochs=0)), init=fm)
    assert all(np.array_equal(kept.state()[name], value) for name, value in fm.state().items())
    assert report.steps == 0


def test_distillation_teaches_the_teachers_opinion() -> None:
    rows, features = tiny_world(5, users=60)
    labels = np.full(len(rows.item), np.nan, np.float32)  # not one label: all there is, is the teacher
    training = RankerTraining(Schedule(epochs=4, batch=128, rate=1e-2, tail=0.0), teacher_weight=1.0)
    teacher = np.where(rows.item % 2 == 0, 0.9, 0.2)
    ranker, _ = train_ranker(features, None, np.zeros_like(labels), VM, 1, training, teacher=teacher)
    scores = ranker.score_many(features)
    assert abs(scores[rows.item % 2 == 0].mean() - 0.9) < 0.1
    assert abs(scores[rows.item % 2 == 1].mean() - 0.2) < 0.1


def test_a_second_task_has_a_head_of_its_own_and_may_lack_labels() -> None:
    rows, _ = tiny_world(6, users=60)
    second = np.where(np.random.default_rng(0).random(len(rows.item)) < 0.5, np.nan, rows.item % 2).astype(np.float32)
    both = replace(rows, labels=np.column_stack((rows.labels[:, 0], second)))
    config = replace(FM, tasks=("positive", "even"))
    fm, _ = train_foundation(both, config, 1, FmTraining(Schedule(epochs=20, batch=128, rate=1e-2, patience=99)))
    chances = foundation_outputs(fm, both)[1]
    assert chances.shape == (len(rows.item), 2)
    assert evaluate(chances[:, 1], second).auc > 0.9


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"labels": np.zeros((3, 1), np.float32)}, "labels are"),
        ({"ts": np.array([2, 1], np.int64)}, "not in time order"),
        ({"content": np.zeros((2, 3), np.float32)}, "content has 3 numbers"),
        ({"context": np.zeros((2, 3), np.float32)}, r"context is \[2, 3\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change: dict[str, np.ndarray], sentence: str) -> None:
    zeros = np.zeros((2, 1))
    rows = FmRows(
        np.array([1, 2]), zeros.astype(np.int32), zeros.astype(np.uint8), zeros.astype(np.int64), np.array([0, 1], np.int32),
        np.array([0, 1], np.int32), zeros.astype("f"), np.zeros(2, np.int32), np.zeros(2, np.int32), np.zeros((2, 0), "f"),
        np.zeros((2, 0), "f"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=sentence):
        train_foundation(replace(rows, **change), FM, 1)


def test_hidden_rows_are_those_that_were_not_yet_there() -> None:
    rows, _ = tiny_world(7, users=4)
    hour = 3_600_000
    batch = rows.histories(np.array([0, 1]), np.array([0, 10 * hour]), "cpu")
    hours = rows.history_age_ms[1] / hour
    assert batch.valid[0].all()
    assert batch.valid[1].tolist() == (hours >= 10).tolist()
    np.testing.assert_allclose(batch.hours[1][batch.valid[1]], hours[hours >= 10] - 10, atol=1e-3)


def test_groups_cover_every_pair_once() -> None:
    counts = np.array([0, 5, 32, 33, 0, 100, 1])
    starts = np.concatenate(([0], np.cumsum(counts)))
    groups = Groups.of(starts, 1, 7)
    pairs = groups.pairs(np.arange(len(groups.request)))
    assert sorted(pairs[pairs >= 0].tolist()) == list(range(171))
    for request, row in zip(groups.request, pairs, strict=True):
        mine = row[row >= 0]
        assert starts[request] <= mine.min()
        assert mine.max() < starts[request + 1]


def test_batches_hold_every_request_once() -> None:
    counts = np.array([3, 0, 50, 7, 7, 1, 1, 20])
    batches = epoch_batches(counts, 16, np.random.default_rng(0))
    assert sorted(np.concatenate(batches).tolist()) == list(range(8))
    assert len(batches) == 3


def test_dropping_vectors_takes_a_share_of_each_slot() -> None:
    _, vectors = features_of(1, [4] * 3000)
    dropped = drop_vectors(vectors, 0.25, np.random.default_rng(0))
    for name in ("exact_age_ms", "user_age_ms", "neighbor_age_ms"):
        had, has = getattr(vectors, name) >= 0, getattr(dropped, name) >= 0
        assert not (has & ~had).any()
        assert abs(has.sum() / had.sum() - 0.75) < 0.05


def test_metrics_against_a_count_by_hand() -> None:
    g = np.random.default_rng(0)
    p, y = np.round(g.random(60), 1), (g.random(60) < 0.4).astype(float)
    wins = [(a > b) + 0.5 * (a == b) for a in p[y == 1] for b in p[y == 0]]
    assert auc(p, y) == pytest.approx(np.mean(wins))
    base = evaluate(np.full(60, y.mean()), y)
    assert base.ne == pytest.approx(1.0)
    assert base.ece < 0.3
    assert evaluate([0.1, 0.9, 0.5], [0, 1, np.nan]).bce == pytest.approx(-np.log(0.9))
    assert evaluate([], []).rows == 0


def test_an_anchored_refresh_learns_items_and_moves_nothing_else() -> None:
    rows, _ = tiny_world(8, users=40)
    old = FoundationModel.untrained(FM, 7)
    new, _ = train_foundation(rows, FM, 1, FmTraining(Schedule(epochs=1, batch=256), anchored=True), init=old)
    before, after = old.state(), new.state()
    assert {name for name in before if not np.array_equal(before[name], after[name])} == set(ITEM_TABLES)


def test_outputs_of_older_histories_are_those_of_rows_that_end_earlier() -> None:
    rows, _ = tiny_world(9, users=20)
    model = FoundationModel.untrained(FM, 1)
    chosen = np.arange(len(rows.ts)) % 2 == 0
    age = np.full(len(rows.ts), 10 * 3_600_000)
    vectors, chances = foundation_outputs(model, rows, age_ms=age, chosen=chosen)
    hidden = rows.history_age_ms < age[:, None]
    earlier = replace(
        rows,
        history_item=np.where(hidden, -1, rows.history_item).astype(np.int32),
        history_age_ms=np.maximum(rows.history_age_ms - age[:, None], 0),
    )
    mine = chosen[rows.request]
    wanted = foundation_outputs(model, earlier)
    np.testing.assert_allclose(vectors[mine], wanted[0][mine], atol=1e-5)
    np.testing.assert_allclose(chances[mine], wanted[1][mine], atol=1e-5)
    assert not vectors[~mine].any()
    assert np.abs(vectors - foundation_outputs(model, rows)[0])[mine].max() > 1e-3  # age counts


def test_one_head_is_trained_for_hits_and_misses_alike() -> None:
    rows, features = tiny_world(10, users=20)
    hit = np.random.default_rng(0).random(len(rows.item)) < 0.5
    vectors = replace(no_vectors(len(rows.item), len(rows.ts), VM.d), exact_age_ms=np.where(hit, 0, -1))
    short = RankerTraining(Schedule(epochs=1, batch=256), heads=1, vector_dropout=0.0)
    one, _ = train_ranker(features, vectors, rows.labels[:, 0], VM, 1, short)
    two, _ = train_ranker(features, vectors, rows.labels[:, 0], VM, 1, replace(short, heads=2))
    assert one.state()["heads"][0].tolist() == one.state()["heads"][1].tolist()
    assert two.state()["heads"][0].tolist() != two.state()["heads"][1].tolist()

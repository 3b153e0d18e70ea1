"""P(asked): calibration and learning on data with a known truth, outcomes against a loop, sampling without bias."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.asked import FEATURES, Asked, isotonic, sigmoid
from streams.outcomes import Outcomes
from streams.pairs import mix64
from tests.oracles import speculate as oracle

D = len(FEATURES)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 9)), min_size=1, max_size=12))
def test_isotonic_is_the_least_squares_fit(points: list[tuple[float, float]]) -> None:
    values, weights = zip(*points, strict=True)
    fitted = isotonic(np.array(values), np.array(weights))
    assert fitted == pytest.approx(oracle.isotonic(values, weights), abs=1e-9)


def truth(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, probabilities that are no logistic function of them, labels."""
    rows = rng.normal(0, 0.5, (n, D)).astype(np.float32)
    rows[:, 0] = 1.0
    logits = -1.5 + rows[:, [1, 2, 7, 15, 30]] @ np.array([1.5, -1.0, 0.8, 0.5, -0.5])
    p = 0.8 * sigmoid(1.7 * logits)
    return rows, p, rng.random(n) < p


def learned(seed: int, batches: int = 60, size: int = 400) -> Asked:
    rng, asked = np.random.default_rng(seed), Asked()
    for _ in range(batches):
        rows, _, labels = truth(rng, size)
        asked.learn(rows, labels, asked.calibrated(asked.logits(rows)).astype(np.float32))
    return asked


def test_it_learns_in_one_pass_and_is_calibrated() -> None:
    asked, rng = learned(1), np.random.default_rng(2)
    rows, p, labels = truth(rng, 40_000)
    predicted = asked.calibrated(asked.logits(rows))
    loss = -np.mean(np.where(labels, np.log(predicted), np.log1p(-predicted)))
    best = -np.mean(np.where(labels, np.log(p), np.log1p(-p)))
    assert loss < best + 0.004
    for low in np.arange(0.0, 0.7, 0.1):
        inside = (predicted >= low) & (predicted < low + 0.1)
        assert abs(predicted[inside].mean() - labels[inside].mean()) < 0.025 + 2 * (0.25 / inside.sum()) ** 0.5
    assert asked.calibration_error() < 0.05  # of forecasts made on the way, the first ones included
    assert sum(row["count"] for row in asked.reliability()) > 5_000


def test_calibration_never_falls_and_follows_the_model_where_nothing_was_seen() -> None:
    fresh, asked = Asked(), learned(3, batches=5)
    logits = np.linspace(-15, 12, 500)
    assert fresh.calibrated(logits) == pytest.approx(sigmoid(logits), abs=0.01)
    assert (np.diff(asked.calibrated(logits)) >= 0).all()


def test_the_same_outcomes_teach_the_same() -> None:
    assert (learned(4, 3).weights == learned(4, 3).weights).all()


def test_export_and_load() -> None:
    asked, warm, cold = learned(5, 10), Asked(), Asked()
    rows, _, _ = truth(np.random.default_rng(6), 50)
    assert warm.load(asked.export(), counts=False)
    assert (warm.calibrated(warm.logits(rows)) == asked.calibrated(asked.logits(rows))).all()
    assert warm.labels == 0
    other = {**asked.export(), "asked_weights": np.zeros(D + 1)}
    assert not cold.load(other)
    assert (cold.weights == Asked().weights).all()


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 70)), max_size=40),
)
@settings(max_examples=150, deadline=None)
def test_outcomes_are_what_a_loop_says(considered: list[tuple[int, int]], demands: list[tuple[int, int]]) -> None:
    ttl = 15
    waiting = Outcomes(1_000, 1.0, ttl, 0, 1, seed=0)
    steps = sorted([(ts, 1, key) for key, ts in considered] + [(ts, 0, key) for key, ts in demands])
    for ts, kind, key in steps:  # at equal times the demand first: it is no answer to what is considered then
        names = mix64(np.array([key], np.uint64))
        if kind:
            assert waiting.choose(names, ts).tolist() == [0]
            waiting.add(names, ts, np.array([[key]], np.float32), np.array([0.5], np.float32))
        else:
            waiting.asked(names, np.array([ts]))
    rows, asked, _ = waiting.ripe(1_000)
    wanted = oracle.outcomes(sorted(considered, key=lambda pair: pair[1]), demands, ttl)
    assert sorted(zip(rows[:, 0].tolist(), asked.tolist(), strict=True)) == sorted((k, hit) for k, _, hit in wanted)
    assert len(waiting) == 0


def test_outcomes_are_due_when_ttl_and_grace_have_passed() -> None:
    waiting = Outcomes(100, 1.0, 50, 5, 1, seed=0)
    waiting.add(mix64(np.arange(3, dtype=np.uint64)), 10, np.zeros((3, 1), np.float32), np.zeros(3, np.float32))
    assert len(waiting.ripe(64)[0]) == 0
    assert len(waiting.ripe(65)[0]) == 3


def test_the_sample_is_bounded_and_fair() -> None:
    waiting, keys = Outcomes(1_000, 0.5, 10_000, 0, 1, seed=3), mix64(np.arange(400, dtype=np.uint64))
    for ts in range(60):
        chosen = waiting.choose(keys, ts)
        waiting.add(keys[chosen], ts, chosen[:, None].astype(np.float32), np.full(len(chosen), ts, np.float32))
        assert len(waiting) <= 1_000
    rows, _, times = waiting.ripe(100_000)
    assert waiting.rate < 0.1
    assert 250 < len(rows) <= 1_000
    assert abs(rows.mean() - 199.5) < 20  # keys of all numbers alike
    assert abs(times.mean() - 29.5) < 4  # and of all times, not of those before it was full


def test_the_demand_that_prompted_a_forecast_is_not_its_outcome() -> None:
    waiting, key = Outcomes(10, 1.0, 50, 0, 1, seed=0), mix64(np.arange(1, dtype=np.uint64))
    for ts, expected in ((10, False), (11, True), (60, True), (61, False)):
        waiting.add(key, 10, np.zeros((1, 1), np.float32), np.zeros(1, np.float32))
        waiting.asked(key, np.array([ts]))
        assert waiting.ripe(100)[1].tolist() == [expected]

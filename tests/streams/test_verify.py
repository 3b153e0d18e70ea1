"""The budget held by the shadow price under bursts and a daily rhythm; every candidate admitted or dropped with a reason."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.verify import ShadowPrice, Verifier, VerifyConfig

START, SECOND, HOUR = 1_700_000_000_000, 1_000, 3_600_000


def simulate(
    config: VerifyConfig, rate: object, seconds: int, share: float = 1.0, seed: int = 0, step: int = 20
) -> tuple[ShadowPrice, np.ndarray]:
    """`rate(second)` candidates a second with skewed values; returns the price and what was bought in each step."""
    rng, price, bought = np.random.default_rng(seed), ShadowPrice(config, share), []
    for second in range(0, seconds, step):
        wanted = rng.poisson(rate(second) * step)  # type: ignore[operator]
        values = 0.25 * rng.beta(0.4, 6.0, wanted)
        price.earn(START + second * SECOND, wanted)
        price.offer(values)
        bought.append(int(price.buy(values).sum()))
    return price, np.array(bought)


def daily(second: int) -> float:
    return 40.0 * (1.0 + 0.9 * np.sin(2 * np.pi * second / 86_400))


def bursts(second: int) -> float:
    return 400.0 if second % 3_600 < 120 else 25.0


@pytest.mark.parametrize("rate", [lambda _: 30.0, daily, bursts], ids=["steady", "daily", "bursts"])
@pytest.mark.parametrize("budget", [0.5, 3.0])
def test_the_budget_is_spent_within_five_per_cent(rate: object, budget: float) -> None:
    _, bought = simulate(VerifyConfig(pairs_per_s=budget), rate, 3 * 86_400, step=60)
    day = 86_400 // 60
    for first in (day, 2 * day):
        assert bought[first : first + day].sum() == pytest.approx(budget * 86_400, rel=0.05)


def test_a_partition_holds_its_share() -> None:
    _, bought = simulate(VerifyConfig(pairs_per_s=8.0), lambda _: 30.0, 40_000, share=0.25)
    assert bought[len(bought) // 2 :].sum() == pytest.approx(2.0 * 20_000, rel=0.05)


@pytest.mark.parametrize("rate", [lambda _: 5.0, daily], ids=["steady", "daily"])
def test_a_budget_per_ranked_pair_follows_the_traffic(rate: object) -> None:
    config = VerifyConfig(pairs_per_ranked=0.1)
    price, bought = simulate(config, rate, 2 * 86_400, step=60)
    assert price.spent == pytest.approx(price.earned, rel=0.05)
    half = len(bought) // 2
    assert bought[half:].sum() == pytest.approx(bought.sum() / 2, rel=0.05)


def test_a_burst_is_paid_from_the_credit_and_no_further() -> None:
    config = VerifyConfig(pairs_per_s=1.0, burst_ms=300_000)
    price, _ = simulate(config, lambda _: 20.0, 20_000)
    values = np.full(100_000, 0.25)
    price.offer(values)
    credit = price.credit
    assert 0 < price.buy(values).sum() <= credit <= 2 * 300
    assert price.credit >= 0


def test_equal_values_leave_no_budget_unspent() -> None:
    """The histogram alone can't tell a price between all and nothing; the credit's feedback does."""
    price = ShadowPrice(VerifyConfig(pairs_per_s=1.0), 1.0)
    for second in range(0, 40_000, 20):
        price.earn(START + second * SECOND, 0)
        values = np.full(200, 0.1)
        price.offer(values)
        price.buy(values)
    assert price.spent == pytest.approx(price.earned, rel=0.05)


def test_hourly_spending_neither_starves_nor_floods() -> None:
    _, bought = simulate(VerifyConfig(pairs_per_s=3.0), daily, 2 * 86_400, step=60)
    hours = bought[len(bought) // 2 :].reshape(24, -1).sum(axis=1)
    assert hours.min() > 0.6 * 3.0 * 3_600
    assert hours.max() < 1.4 * 3.0 * 3_600


def test_what_is_bought_is_the_dearest() -> None:
    price, _ = simulate(VerifyConfig(pairs_per_s=1.0), lambda _: 30.0, 10_000)
    values = np.random.default_rng(5).permutation(np.linspace(0.0, 0.25, 5_000))
    admitted = price.buy(values)
    assert admitted.any()
    assert values[admitted].min() > values[~admitted].max()


def test_an_infinite_budget_takes_all_and_one_of_nothing_takes_nothing() -> None:
    free, shut = (
        ShadowPrice(VerifyConfig(pairs_per_s=float("inf")), 1.0),
        ShadowPrice(VerifyConfig(pairs_per_s=0.0), 1.0),
    )
    for price in (free, shut):
        for second in range(0, 4_000, 10):
            price.earn(START + second * SECOND, 0)
            price.offer(np.full(5, 0.1))
    assert free.buy(np.array([0.0, 1e-12, 0.2])).all()
    assert sum(int(shut.buy(np.full(10, 0.2)).sum()) for _ in range(50)) <= 1


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.booleans(), st.booleans()), max_size=60))
@settings(max_examples=100, deadline=None)
def test_every_candidate_is_admitted_or_counted(rows: list[tuple[int, float, bool, bool]]) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    owner = np.array([row[0] for row in rows], np.int64)
    p_asked, fresh, in_flight = (
        np.array([row[at] for row in rows], kind) for at, kind in ((1, float), (2, bool), (3, bool))
    )
    verifier = Verifier(
        VerifyConfig(pairs_per_s=0.02, scored_per_user_max=6, request_pairs_max=3, burst_ms=HOUR // 10), 1.0
    )
    short = verifier.shortlist(owner, p_asked, fresh, in_flight)
    values = verifier.values(p_asked[short], np.full(len(short), 0.3))
    bought = short[verifier.admit(owner[short], values)]
    assert len(bought) + sum(verifier.dropped.values()) == len(rows)
    assert verifier.dropped["fresh"] == fresh.sum()
    assert verifier.dropped["in_flight"] == (in_flight & ~fresh).sum()
    assert not (fresh | in_flight)[bought].any()
    assert np.bincount(owner[short], minlength=4).max(initial=0) <= 6
    assert np.bincount(owner[bought], minlength=4).max(initial=0) <= 3


def test_value_is_p_asked_times_the_rankers_uncertainty() -> None:
    verifier = Verifier(VerifyConfig(), 1.0)
    p_asked, scores = np.array([0.5, 0.5, 0.5, 0.25]), np.array([0.5, 0.9, np.nan, 0.5])
    assert verifier.values(p_asked, scores) == pytest.approx([0.125, 0.045, 0.0, 0.0625])
    assert Verifier(VerifyConfig(value="asked"), 1.0).values(p_asked, scores) == pytest.approx(p_asked)


def test_value_is_the_curvature_of_the_log_loss() -> None:
    """A logit off by a small e costs e²/2 · v (1 - v) in expectation: what the docstring of verify says."""
    for v in (0.05, 0.3, 0.5, 0.9):
        logit, e = np.log(v / (1 - v)), 1e-3
        loss = [
            -(v * np.log(q) + (1 - v) * np.log(1 - q)) for q in (1 / (1 + np.exp(-(logit + d))) for d in (-e, 0.0, e))
        ]
        assert (loss[0] + loss[2] - 2 * loss[1]) / e**2 == pytest.approx(v * (1 - v), rel=1e-3)


def test_the_shortlist_keeps_the_likeliest_of_each_owner() -> None:
    owner = np.repeat(np.arange(3), 20)
    p_asked = np.random.default_rng(1).random(60)
    short = Verifier(VerifyConfig(scored_per_user_max=5), 1.0).shortlist(owner, p_asked, *np.zeros((2, 60), bool))
    for one in range(3):
        mine = np.flatnonzero(owner == one)
        assert set(short[owner[short] == one]) == set(mine[np.argsort(-p_asked[mine])[:5]])

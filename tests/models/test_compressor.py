"""The compressor: round trips of awkward vectors, refusals, a floor under dead dimensions."""

from __future__ import annotations

import numpy as np
import pytest

from models.compressor import CLIP, SCALE_MIN, Compressor, CompressorConfig, floored_std, quantise
from models.train import fit_compressor
from schemas.errors import BundleError


def sample(
    n: int = 1500, dims: int = 24, rank: int = 5, seed: int = 0
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    g = np.random.default_rng(seed)
    return (
        g.standard_normal((n, rank)) @ g.standard_normal((rank, dims)) + 0.05 * g.standard_normal((n, dims))
    ).astype("f")


@pytest.fixture(scope="module", params=["autoencoder", "pca", "random"])
def compressor(request: pytest.FixtureRequest) -> Compressor:
    return fit_compressor(sample(), CompressorConfig(kind=request.param, dims=24, d=8, epochs=30), seed=1)[0]


@pytest.mark.parametrize(
    "vector",
    [
        np.full(24, 1.0),
        np.full(24, 1e-8),
        np.full(24, 70_000.0),
        np.tile([1.0, -1.0], 12),
        np.full(24, -3e38),
        np.eye(24)[3],
    ],
    ids=["constant", "tiny", "large", "mixed", "huge", "one"],
)
def test_awkward_vectors_come_back_finite(compressor: Compressor, vector: np.ndarray) -> None:
    codes, scales = compressor.encode(vector[None].astype(np.float32))
    small = compressor.decode(codes, scales)
    assert codes.dtype == np.int8
    assert codes.any(axis=1).all()
    assert (scales > 0).all()
    assert np.isfinite(small).all()
    assert np.abs(small).max() <= CLIP * 1.001
    gap = np.abs(small - compressor.project(vector[None].astype(np.float32))).max()
    assert gap <= max(scales[0] / 2 + 1e-6, SCALE_MIN)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf])
def test_unusable_vectors_are_refused_by_row(compressor: Compressor, value: float) -> None:
    vectors = sample(6)
    vectors[4] = value
    assert compressor.usable(vectors).tolist() == [True] * 4 + [False, True]
    with pytest.raises(ValueError, match=r"rows \[4\]"):
        compressor.encode(vectors)


def test_a_row_of_zeros_keeps_a_code() -> None:
    codes, scales = quantise(np.array([[0.0, 0.0], [1e-9, -2e-9], [3.0, -3.0]], np.float32))
    assert codes.tolist() == [[1, 0], [0, -1], [127, -127]]
    assert np.abs(codes[:2] * scales[:2, None]).max() <= SCALE_MIN + 1e-12


def test_vectors_do_not_hang_on_company(compressor: Compressor) -> None:
    vectors = sample(200, seed=3)
    every = compressor.decode(*compressor.encode(vectors))
    one = compressor.decode(*compressor.encode(vectors[17:18]))
    np.testing.assert_allclose(one[0], every[17], atol=0.05)  # a code may round the other way


def test_five_directions_fit_into_eight_numbers() -> None:
    fresh = sample(seed=4)  # other noise, and other directions for the random one's benefit
    errors = {
        kind: fit_compressor(fresh, CompressorConfig(kind=kind, dims=24, d=8, epochs=30), seed=1)[1]["error"]
        for kind in ("autoencoder", "pca", "random")
    }
    assert errors["pca"] < 0.02
    assert errors["autoencoder"] < 0.1
    assert errors["random"] > errors["pca"]


def test_a_dead_dimension_is_not_blown_up() -> None:
    vectors = sample()
    vectors[:, 7] = 1.0 + 1e-7 * np.arange(len(vectors))
    std = floored_std(vectors)
    assert std[7] == pytest.approx(np.median(vectors.std(0)) / 2, rel=0.05)
    compressor, _ = fit_compressor(vectors, CompressorConfig(dims=24, d=8, epochs=2), seed=1)
    drifted = vectors.copy()
    drifted[:, 7] += 0.5  # far in deviations of its own, near in those of the others
    assert np.abs(compressor.standardise(drifted)[:, 7]).max() <= 1.0
    assert compressor.drift(vectors)[0] < 0.01
    assert compressor.drift(vectors + 3 * vectors.std(0))[0] > 1.0


def test_the_same_seed_gives_the_same_bytes() -> None:
    config = CompressorConfig(dims=24, d=8, epochs=2)
    states = [fit_compressor(sample(), config, seed=seed)[0].state() for seed in (1, 1, 2)]
    assert all(states[0][name].tobytes() == states[1][name].tobytes() for name in states[0])
    assert states[0]["encode_0"].tobytes() != states[2]["encode_0"].tobytes()


def test_fitting_counts_what_it_refused_and_needs_two() -> None:
    vectors = sample(50)
    vectors[3], vectors[4, 2] = 0, np.nan
    _, report = fit_compressor(vectors, CompressorConfig(kind="pca", dims=24, d=4), seed=0)
    assert (report["rows"], report["refused"]) == (48, 2)
    with pytest.raises(ValueError, match="at least 2"):
        fit_compressor(np.zeros((9, 24), np.float32), CompressorConfig(dims=24), seed=0)


def test_tensors_of_other_dimensions_are_refused() -> None:
    state = Compressor.untrained(CompressorConfig(kind="random", dims=24, d=8), 1).state()
    with pytest.raises(BundleError, match="24 to 8 numbers, not 24 to 6"):
        Compressor(CompressorConfig(kind="random", dims=24, d=6), state)
    with pytest.raises(BundleError, match="lacks decode_0"):
        Compressor(CompressorConfig(dims=24, d=8), {k: v for k, v in state.items() if k != "decode_0"})

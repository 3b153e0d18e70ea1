"""The ranker: a request's bytes hang on itself alone, numpy agrees with torch, gaps are gaps."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.features import Features, Vectors, no_vectors, pair_starts, take_requests
from models.ranker import Ranker, RankerConfig
from tests.models.made_up import features_of

CONFIG = RankerConfig(d=8, content_dims=4, item_buckets=5000, category_buckets=300, user_buckets=700)
COUNTS = [0, 1, 7, 128, 129, 300, 0, 40]


@pytest.fixture(scope="module")
def ranker() -> Ranker:
    return Ranker.untrained(CONFIG, seed=1)


@pytest.fixture(scope="module")
def data() -> tuple[Features, Vectors]:
    return features_of(3, COUNTS)


def test_a_request_gets_the_same_bytes_alone_and_in_company(ranker: Ranker, data: tuple[Features, Vectors]) -> None:
    features, vectors = data
    together = ranker.score(features, vectors)
    for request in range(len(COUNTS)):
        alone, had, pairs = take_requests(features, vectors, np.array([request]))
        assert ranker.score(alone, had).tobytes() == together[pairs].tobytes()
    backwards = np.arange(len(COUNTS))[::-1].copy()
    other, had, pairs = take_requests(features, vectors, backwards)
    assert ranker.score(other, had).tobytes() == together[pairs].tobytes()
    assert together.std() > 0.05  # else equality says little


@pytest.mark.parametrize("with_vectors", [True, False])
@pytest.mark.parametrize("content_dims", [0, 4])
def test_numpy_agrees_with_torch(with_vectors: bool, content_dims: int) -> None:
    config = replace(CONFIG, vectors=with_vectors, content_dims=content_dims)
    state = Ranker.untrained(config, seed=2).state()
    g = np.random.default_rng(0)
    state["dense_mean"], state["dense_std"] = g.random(17).astype(np.float32), 0.1 + g.random(17).astype(np.float32)
    for name in ("type_bias", "age_weight", "pair.bias", "cross.bias", "second.bias"):
        state[name] = g.standard_normal(state[name].shape).astype(np.float32)
    ranker = Ranker(config, state)
    features, vectors = features_of(4, COUNTS, content_dims=content_dims)
    np.testing.assert_allclose(ranker.score(features, vectors), ranker.score_many(features, vectors), atol=1e-6, rtol=0)


def test_bytes_do_not_hang_on_blas_threads() -> None:
    script = (
        "import hashlib; from tests.models.made_up import features_of; from tests.models.test_ranker import CONFIG; "
        "from models.ranker import Ranker; r = Ranker.untrained(CONFIG, 1); f, v = features_of(3, [128] * 20); "
        "print(hashlib.sha256(r.score(f, v).tobytes()).hexdigest())"
    )

    def digest(threads: int) -> str:
        counts = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        run = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **counts}, capture_output=True, check=True
        )
        return run.stdout.decode().strip()

    features, vectors = features_of(3, [128] * 20)
    here = hashlib.sha256(Ranker.untrained(CONFIG, 1).score(features, vectors).tobytes()).hexdigest()
    assert digest(8) == here


def test_everything_missing_is_the_plain_view(ranker: Ranker, data: tuple[Features, Vectors]) -> None:
    features, _ = data
    n, r = len(features.request), len(COUNTS)
    bare = replace(
        features,
        history_bucket=np.full_like(features.history_bucket, -1),
        history_category=np.full_like(features.history_category, -1),
        content=np.zeros_like(features.content),
    )
    scores = ranker.score(bare)
    assert np.isfinite(scores).all()
    assert scores.tobytes() == ranker.score(bare, no_vectors(n, r, CONFIG.d)).tobytes()


def test_what_is_masked_can_not_leak(ranker: Ranker, data: tuple[Features, Vectors]) -> None:
    features, vectors = data
    missing = np.full_like(vectors.exact_age_ms, -1), np.full_like(vectors.user_age_ms, -1)
    poisoned = Vectors(
        np.full_like(vectors.exact, np.nan), missing[0], np.full_like(vectors.user, np.nan), missing[1],
        np.full_like(vectors.neighbor, np.nan), missing[1],
    )  # fmt: skip
    assert ranker.score(features, poisoned).tobytes() == ranker.score(features).tobytes()
    np.testing.assert_allclose(ranker.score_many(features, poisoned), ranker.score(features), atol=1e-6)
    assert not np.allclose(ranker.score(features, vectors), ranker.score(features))  # and what is there counts


def test_a_candidate_that_is_not_finite_spoils_itself_alone(ranker: Ranker, data: tuple[Features, Vectors]) -> None:
    features, vectors = data
    dense = features.dense.copy()
    dense[5] = np.nan
    scores, before = ranker.score(replace(features, dense=dense), vectors), ranker.score(features, vectors)
    assert np.isnan(scores[5])
    assert np.delete(scores, 5).tobytes() == np.delete(before, 5).tobytes()


def test_vectors_and_content_of_another_bundle_are_refused(ranker: Ranker, data: tuple[Features, Vectors]) -> None:
    features, vectors = data
    wide = no_vectors(len(features.request), len(features.user_bucket), ranker.config.d + 1)
    with pytest.raises(ValueError, match="of one bundle"):
        ranker.score(features, wide)
    with pytest.raises(ValueError, match="of one bundle"):
        ranker.score(replace(features, content=features.content[:, :-1].copy()), vectors)


def test_the_base_ranker_reads_no_vector(data: tuple[Features, Vectors]) -> None:
    features, vectors = data
    base = Ranker.untrained(replace(CONFIG, vectors=False), seed=1)
    assert base.score(features, vectors).tobytes() == base.score(features).tobytes()


def test_item_vectors_do_not_hang_on_company(ranker: Ranker, data: tuple[Features, Vectors]) -> None:
    features, _ = data
    every = ranker.item_vectors(features.item_bucket, features.category, features.content)
    assert every.shape == (len(features.request), CONFIG.item_dims)
    assert every.dtype == np.float32
    one = ranker.item_vectors(features.item_bucket[9:10], features.category[9:10], features.content[9:10])
    np.testing.assert_allclose(one[0], every[9], atol=1e-6)


def test_taking_requests_keeps_each_pair_with_its_own(data: tuple[Features, Vectors]) -> None:
    features, vectors = data
    chosen = np.array([5, 0, 2])
    taken, had, pairs = take_requests(features, vectors, chosen)
    starts = pair_starts(features)
    wanted = np.concatenate([np.arange(starts[q], starts[q + 1]) for q in chosen])
    assert pairs.tolist() == wanted.tolist()
    assert np.array_equal(taken.user_bucket[taken.request], features.user_bucket[features.request[pairs]])
    assert np.array_equal(had.exact, vectors.exact[pairs])
    assert np.array_equal(had.user, vectors.user[chosen])


def test_a_widened_ranker_scores_like_the_one_without_vectors(data: tuple[Features, Vectors]) -> None:
    base = Ranker.untrained(replace(CONFIG, vectors=False), 3)
    features, vectors = data
    wide = base.widened()
    assert wide.config.vectors
    np.testing.assert_allclose(wide.score(features, vectors), base.score(features), atol=1e-6)


def test_one_head_scores_a_hit_like_any_other_pair(ranker: Ranker, data: tuple[Features, Vectors]) -> None:
    features, vectors = data
    with torch.inference_mode():
        first = ranker.one_headed()._net(features, vectors).numpy()
    np.testing.assert_allclose(first[:, 0], first[:, 1], atol=1e-6)
    hits = vectors.exact_age_ms >= 0
    np.testing.assert_array_equal(
        ranker.one_headed().score(features, vectors)[~hits], ranker.score(features, vectors)[~hits]
    )

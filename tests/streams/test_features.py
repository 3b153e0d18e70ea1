"""Features equal the plain oracle on random data, and a request's bytes do not depend on its company."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from models.features import AGE_NEVER, DENSE, SHORT_HISTORY, Features
from schemas.keys import hash64
from streams.features import USER_BUCKET_MASK, build_features
from streams.history import HistoryRow
from streams.items import ItemIndex
from tests.oracles.features import dense_of_pair
from tests.streams.fakes import item_index

NOW = 1_700_000_000_000
HOUR = 3_600_000


def _row(*pairs: tuple[str, int]) -> HistoryRow:
    numbers = np.arange(1, len(pairs) + 1)
    return HistoryRow(
        [name for name, _ in pairs], numbers.astype(np.uint8), np.array([ts for _, ts in pairs], np.int64), numbers
    )


def _random_request(rng: np.random.Generator, n: int, rows_max: int = 120) -> dict[str, Any]:
    def history() -> HistoryRow:
        size = int(rng.integers(0, rows_max))
        ts = np.sort(NOW - rng.integers(0, 40 * 24 * HOUR, size))
        return _row(*((f"i{x}", int(t)) for x, t in zip(rng.integers(0, 60, size), ts, strict=True)))

    return {
        "user": f"u{rng.integers(1000)}",
        "history": history(),
        "shown": history(),
        "now": NOW + int(rng.integers(0, 24 * HOUR)),
        "names": [f"i{x}" for x in rng.choice(100, n, replace=False)],
        "item_counts": rng.integers(0, 50, (n, 2)),
        "user_counts": rng.integers(0, 50, 2),
    }


def _build(requests: list[dict[str, Any]], items: ItemIndex) -> Features:
    sizes = [len(request["names"]) for request in requests]
    return build_features(
        [request["user"] for request in requests],
        [request["history"] for request in requests],
        [request["shown"] for request in requests],
        np.array([request["now"] for request in requests], np.int64),
        np.repeat(np.arange(len(requests), dtype=np.int32), sizes),
        items.intern([name for request in requests for name in request["names"]]),
        items,
        np.concatenate([request["item_counts"] for request in requests]).reshape(-1, 2),
        np.array([request["user_counts"] for request in requests], np.int64).reshape(-1, 2),
    )


def _pairs(row: HistoryRow) -> list[tuple[str, int]]:
    return list(zip(row.items, row.ts.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_dense_equals_the_oracle(seed: int) -> None:
    rng, items = np.random.default_rng(seed), item_index([f"i{x}" for x in range(100)])
    requests = [_random_request(rng, int(rng.integers(0, 30)), (1, 120)[seed % 2]) for _ in range(5)]
    features = _build(requests, items)
    names = [f"i{x}" for x in range(100)]
    rows = items.intern(names)
    category = dict(zip(names, items.category[rows].tolist(), strict=True))
    content = dict(zip(names, items.content[rows].tolist(), strict=True))
    expected = [
        dense_of_pair(
            name, request["now"], _pairs(request["history"]), _pairs(request["shown"]), category, content,
            tuple(request["item_counts"][at]), tuple(request["user_counts"]),
        )
        for request in requests
        for at, name in enumerate(request["names"])
    ]  # fmt: skip
    np.testing.assert_allclose(features.dense, np.array(expected).reshape(-1, len(DENSE)), rtol=2e-5, atol=2e-5)
    assert features.dense.dtype == np.float32
    assert features.dense.flags.c_contiguous


def test_short_history_is_newest_first() -> None:
    items = item_index([f"i{x}" for x in range(100)])
    long = _row(*((f"i{x}", NOW - (20 - x) * HOUR) for x in range(20)))
    request = {
        "user": "u",
        "shown": _row(),
        "now": NOW,
        "names": ["a"],
        "item_counts": np.zeros((1, 2), int),
        "user_counts": [0, 0],
    }
    features = _build([{**request, "history": row} for row in (_row(), _row(("x", NOW - HOUR)), long)], items)
    assert features.history_bucket.shape == (3, SHORT_HISTORY)
    assert (features.history_bucket[0] == -1).all()
    assert (features.history_age[0] == 0).all()
    assert features.history_bucket[1, 0] == hash64("x") % 1000
    assert features.history_age[1, 0] == np.float32(np.log1p(1.0))
    assert (features.history_bucket[1, 1:] == -1).all()
    assert features.history_bucket[2].tolist() == [hash64(f"i{x}") % 1000 for x in range(19, 3, -1)]
    assert features.history_type[2].tolist() == list(range(20, 4, -1))
    assert features.user_bucket.tolist() == [hash64("u") & USER_BUCKET_MASK] * 3


def test_ages_end_at_never_and_do_not_go_below_zero() -> None:
    items = item_index([f"i{x}" for x in range(100)])
    rows = _row(("old", NOW - 60 * 24 * HOUR), ("ahead", NOW + HOUR))
    features = _build(
        [{"user": "u", "history": rows, "shown": _row(), "now": NOW, "names": ["old", "ahead", "never"],
          "item_counts": np.zeros((3, 2), int), "user_counts": [0, 0]}],
        items,
    )  # fmt: skip
    ages = features.dense[:, DENSE.index("pair_touched_age")]
    assert ages.tolist() == [np.float32(AGE_NEVER), 0.0, np.float32(AGE_NEVER)]
    assert np.isfinite(features.dense).all()


def test_positives_without_impressions_stay_finite() -> None:
    request = {"user": "u", "history": _row(), "shown": _row(), "now": NOW, "names": ["a"], "user_counts": [0, 9]}
    features = _build([{**request, "item_counts": np.array([[0, 10**6]])}], item_index([f"i{x}" for x in range(100)]))
    assert np.isfinite(features.dense).all()


def test_nothing_in_nothing_out() -> None:
    rows, counts = np.empty(0, np.int32), np.empty((0, 2), np.int64)
    features = build_features([], [], [], np.empty(0, np.int64), rows, rows, item_index([]), counts, counts)
    assert features.dense.shape == (0, len(DENSE))
    assert features.history_bucket.shape == (0, SHORT_HISTORY)


@pytest.mark.parametrize("seed", range(6))
def test_alone_and_in_a_batch_give_equal_bytes(seed: int) -> None:
    rng, items = np.random.default_rng(seed), item_index([f"i{x}" for x in range(100)])
    requests = [_random_request(rng, int(rng.integers(1, 40))) for _ in range(12)]
    together = _build(requests, items)
    for at, request in enumerate(requests):
        alone, pairs = _build([request], items), together.request == at
        for field in fields(Features):
            if field.name == "request":
                continue
            column = getattr(together, field.name)
            mine = column[pairs] if len(column) == len(pairs) else column[at : at + 1]
            assert mine.tobytes() == getattr(alone, field.name).tobytes(), field.name

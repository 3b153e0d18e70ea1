"""The FM of a replay: what it says of a moment, it knew before that moment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from models.compressor import Compressor, CompressorConfig
from models.features import DENSE
from models.fit import Schedule
from models.foundation import FmConfig, FoundationModel
from models.rows import FmRows
from models.train import FmTraining, foundation_outputs
from solaris.refreshed import Refreshed
from streams.items import ItemIndex
from tests.models.made_up import tiny_world

FM = FmConfig(item_buckets=128, category_buckets=4, width=8, hidden=16, dims=16, head_hidden=8)


def refreshed(model: FoundationModel) -> Refreshed:
    training = FmTraining(Schedule(epochs=1, batch=128, rate=1e-2, tail=0.0), anchored=True)
    compressor = Compressor.untrained(CompressorConfig(dims=FM.dims, d=4), 1)
    return Refreshed(model, compressor, ItemIndex(), training, 1)


def halves() -> tuple[FmRows, FmRows, int]:
    """All rows, those of the first half, and the first request after it."""
    rows, _ = tiny_world(11, users=30)
    edge = int(np.searchsorted(rows.ts, rows.ts[len(rows.ts) // 2]))
    pairs, mine = slice(0, int(rows.starts[edge])), slice(0, edge)
    first = replace(
        rows, ts=rows.ts[mine], history_item=rows.history_item[mine], history_type=rows.history_type[mine],
        history_age_ms=rows.history_age_ms[mine], request=rows.request[pairs], item=rows.item[pairs], labels=rows.labels[pairs],
        context=rows.context[pairs],
    )  # fmt: skip
    return rows, first, edge


def test_each_request_is_answered_by_the_fm_that_had_not_seen_it() -> None:
    rows, first, edge = halves()
    config = replace(FM, context_dims=rows.context.shape[1], content_dims=rows.content.shape[1])
    assert config.context_dims in (0, len(DENSE))
    fm = refreshed(FoundationModel.untrained(config, 1))
    old = fm.model
    fm.refresh(first)
    vectors, chances = fm.outputs(rows)
    late = rows.request >= edge
    before, after = foundation_outputs(old, rows), foundation_outputs(fm.model, rows)
    np.testing.assert_array_equal(chances[~late], before[1][~late])
    np.testing.assert_array_equal(vectors[late], after[0][late])
    assert (before[0][late] != after[0][late]).any()


def test_a_vector_of_an_age_is_of_the_fm_of_that_age() -> None:
    rows, first, _ = halves()
    config = replace(FM, context_dims=rows.context.shape[1], content_dims=rows.content.shape[1])
    fm = refreshed(FoundationModel.untrained(config, 1))
    old = fm.model
    fm.refresh(first)
    age = np.full(len(rows.ts), int(rows.ts[-1] - rows.ts[0]) + 1)
    wanted = foundation_outputs(old, rows, age_ms=age)[0]
    np.testing.assert_array_equal(fm.outputs(rows, age)[0], wanted)

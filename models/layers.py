"""The steps of the ranker's network between its matrix products, in compiled loops; `models.scoring` puts them together.

In: weights, one request's features and vectors. Out: arrays of a fixed shape [ROWS, ...], written in place. Rows beyond the
request's pairs stay what they were. Never a matrix product of size: BLAS has those.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from models.features import F32, I32, I64, SHORT_HISTORY, U8
from models.jit import compiled, number, reads, writes

F64 = npt.NDArray[np.float64]

ATTENTION_MAX = 20.0
"""Attention logits are cut here, so that exp stays finite in float32."""

EMPTY = -1e4
"""Attention logit of an empty history row: exp makes it zero."""

HOUR_MS = 3_600_000.0


@compiled(
    reads(np.float32, 2), reads(np.float32, 2), reads(np.float32), number(np.float32),
    reads(np.int32), reads(np.int32), reads(np.uint8), reads(np.float32),
    writes(np.float32, 2), writes(np.float32), writes(np.float32),
)  # fmt: skip
def history_rows(
    items: F32, categories: F32, type_bias: F32, age_weight: float, bucket: I32, category: I32, types: U8, ages: F32,
    rows: F32, bias: F32, mean: F32,
) -> None:  # fmt: skip
    """A request's history: `rows` [SHORT_HISTORY, 2e], the attention bias of each, and their mean [2e]."""
    e, count = items.shape[1], 0
    mean[:] = 0.0
    for j in range(SHORT_HISTORY):
        if bucket[j] < 0:
            rows[j, :] = 0.0
            bias[j] = EMPTY
            continue
        count += 1
        bias[j] = type_bias[types[j]] + age_weight * ages[j]
        rows[j, :e] = items[bucket[j] % len(items)]
        rows[j, e:] = categories[category[j] % len(categories)]
        mean += rows[j]
    for k in range(2 * e):
        mean[k] /= max(1, count)


@compiled(
    reads(np.float32, 2), reads(np.float32, 2), reads(np.float32, 2),
    reads(np.int32), reads(np.int32), reads(np.float32, 2), reads(np.float32, 2), writes(np.float32, 2),
)  # fmt: skip
def pair_inputs(
    items: F32, categories: F32, content_weight: F32, bucket: I32, category: I32, content: F32, dense: F32, inputs: F32
) -> None:
    """The inputs that a pair brings itself, one row each: item, category, content through `content_weight` [c, e or 0], dense."""
    e, width = items.shape[1], content_weight.shape[1]
    at = 2 * e + width
    for i in range(len(bucket)):
        inputs[i, :e] = items[bucket[i] % len(items)]
        inputs[i, e : 2 * e] = categories[category[i] % len(categories)]
        for k in range(width):
            inputs[i, 2 * e + k] = 0.0
        for j in range(content_weight.shape[0]):
            for k in range(width):
                inputs[i, 2 * e + k] += content[i, j] * content_weight[j, k]
        for k in range(dense.shape[1]):
            inputs[i, at + k] = dense[i, k]


@compiled(
    number(np.int64),
    reads(np.float32, 2),
    reads(np.float32),
    reads(np.float32, 2),
    number(np.int64),
    writes(np.float32, 2),
)
def attention(n: int, dots: F32, bias: F32, history: F32, at: int, inputs: F32) -> None:
    """From `dots` [ROWS, SHORT_HISTORY + cross_rank]: what each pair found in the history, its mass, and the cross terms; into the
    inputs from column `at`."""
    width, cross = history.shape[1], dots.shape[1] - SHORT_HISTORY
    for i in range(n):
        total = 1.0
        inputs[i, at : at + width] = 0.0
        for j in range(SHORT_HISTORY):
            weight = math.exp(min(dots[i, j] + bias[j], ATTENTION_MAX))
            total += weight
            for k in range(width):
                inputs[i, at + k] += weight * history[j, k]
        for k in range(width):
            inputs[i, at + k] /= total
        inputs[i, at + width] = math.log(total)
        for k in range(cross):
            inputs[i, at + width + 1 + k] = dots[i, SHORT_HISTORY + k]


@compiled(reads(np.float32, 2), reads(np.int64), number(np.int64), writes(np.float32, 2))
def exact_slot(vectors: F32, age_ms: I64, at: int, inputs: F32) -> None:
    """The exact vectors with their mask and age, into the inputs from column `at`; zeros where there is none."""
    d = vectors.shape[1]
    for i in range(len(age_ms)):
        if age_ms[i] < 0:
            inputs[i, at : at + d + 2] = 0.0
        else:
            inputs[i, at : at + d] = vectors[i]
            inputs[i, at + d] = 1.0
            inputs[i, at + d + 1] = math.log1p(age_ms[i] / HOUR_MS)


@compiled(reads(np.float32, 2), reads(np.float32), writes(np.float32, 2), writes(np.float32, 2))
def first_layer(products: F32, of_request: F32, hidden: F32, skip: F32) -> None:
    """Products [ROWS, h + 2] and the request's share become `hidden` [ROWS, h] after ReLU, and `skip` [ROWS, 2] as it is."""
    width = hidden.shape[1]
    for i in range(len(products)):
        for k in range(width):
            hidden[i, k] = max(products[i, k] + of_request[k], np.float32(0.0))
        for k in range(2):
            skip[i, k] = products[i, width + k] + of_request[width + k]


@compiled(
    reads(np.float32, 2),
    reads(np.float32),
    reads(np.float32, 2),
    reads(np.float32, 2),
    reads(np.int64),
    writes(np.float64),
)
def heads(products: F32, bias: F32, weights: F32, skip: F32, age_ms: I64, out: F64) -> None:
    """Second layer's products [ROWS, 2h] to probabilities: `weights` [2, h] are the heads of misses and of hits, each with its own
    half of the layer."""
    width = weights.shape[1]
    for i in range(len(out)):
        head = 1 if age_ms[i] >= 0 else 0
        logit = skip[i, head]
        for k in range(width):
            at = head * width + k
            logit += max(products[i, at] + bias[at], np.float32(0.0)) * weights[head, k]
        out[i] = 1.0 / (1.0 + math.exp(-np.float64(logit)))

"""What a model is worth on rows that it has not seen: log loss, normalised entropy, AUC and calibration error.

In: probabilities and labels. Out: `Metrics`. All in float64; no rows or one class give NaN where a figure has no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

ECE_BINS = 15
PROBABILITY_MIN = 1e-7
"""Probabilities are kept this far from 0 and 1 in the log loss, so that one row can't make it infinite."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """`bce`: mean log loss in nats; `ne`: bce over the base rate's (He et al. 2014); `ece`: over ECE_BINS bins of equal count."""

    rows: int
    rate: float
    bce: float
    ne: float
    auc: float
    ece: float


def evaluate(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> Metrics:
    """Metrics of n rows; rows whose label is NaN are left out."""
    p, y = np.asarray(probabilities, np.float64), np.asarray(labels, np.float64)
    known = ~np.isnan(y)
    p, y = p[known], y[known]
    if not len(y):
        return Metrics(0, *(float("nan"),) * 5)
    rate, loss = float(y.mean()), log_loss(p, y)
    base = log_loss(np.full(len(y), rate), y)
    return Metrics(
        len(y), rate, loss, loss / base if 0 < rate < 1 else float("nan"), auc(p, y), calibration_error(p, y)
    )


def log_loss(probabilities: F64, labels: F64) -> float:
    """Mean binary cross-entropy in nats."""
    p = np.clip(probabilities, PROBABILITY_MIN, 1 - PROBABILITY_MIN)
    return float(-np.mean(labels * np.log(p) + (1 - labels) * np.log1p(-p)))


def auc(probabilities: F64, labels: F64) -> float:
    """Chance that a positive scores above a negative, ties counting half (Mann-Whitney); NaN with one class."""
    _, inverse, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2.0)[inverse]
    positives = float(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    return float((ranks @ labels - positives * (positives + 1) / 2) / (positives * negatives))


def calibration_error(probabilities: F64, labels: F64, bins: int = ECE_BINS) -> float:
    """Mean |predicted - observed| over bins of equally many rows, weighted by rows."""
    order = np.argsort(probabilities, kind="stable")
    gaps = [abs(float((probabilities[part] - labels[part]).sum())) for part in np.array_split(order, bins) if len(part)]
    return sum(gaps) / len(labels)

"""P(asked): how likely a pair is to be ranked within the TTL. Logistic regression learned online from outcomes, then
calibrated.

In: feature rows float32 [n, len(FEATURES)] and, once known, labels. Out: probabilities. Never: waits for a batch, uses a random
number or a learning rate.

Learning is recursive Laplace (Spiegelhalter & Lauritzen 1990; an extended Kalman filter on logits): the past is a Gaussian with
mean `weights` and precision `precision`; a batch of outcomes moves it to the new mode by Newton steps. One pass learns nearly
as much as a fit over all of the log. The past fades by half every `half_life` labels. A calibrator then maps logits to observed
rates: pooled adjacent violators over bins of the logit, with a few pseudo-counts on the model's own word, so that an empty bin
changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.inference import SOURCES
from streams.sources import ITEM_FEATURES

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

USER_FEATURES = ("bias", "asks_day", "active_day", "idle_1h", "idle_24h", "hour_sin", "hour_cos")
PAIR_FEATURES = (
    *(f"source_{source}" for source in SOURCES),
    "sources",  # how many of them named the pair
    "touched_1h",  # exp(-age / 1 h) of the pair's last event in the history, 0 where there is none; the next three likewise
    "touched_8h",
    "touched_48h",
    "touched_log",  # log1p of how many
    "shown_1h",
    "shown_8h",
    "shown_48h",
    "shown_log",
    "asked_1h",
    "asked_8h",
    "asked_48h",
    "asked_log",
    "covisit",
    "similar",
    "category_share",
)
FEATURES = (*USER_FEATURES, *ITEM_FEATURES, *PAIR_FEATURES)
"""Names of the features in column order: what depends on the user alone, on the item alone, on the pair."""

USER_COLUMNS = slice(0, len(USER_FEATURES))
ITEM_COLUMNS = slice(len(USER_FEATURES), len(USER_FEATURES) + len(ITEM_FEATURES))
PAIR_COLUMNS = slice(len(USER_FEATURES) + len(ITEM_FEATURES), len(FEATURES))

_BEFORE = {
    "bias": -3.5, "asks_day": 0.2, "demand_day": 0.4, "touched_day": 0.1, "source_reactive": 0.5, "source_revisit": 0.3,
    "touched_1h": 0.5, "touched_8h": 0.5, "shown_8h": 0.5, "asked_1h": 0.5, "asked_8h": 0.7, "asked_log": 0.3, "covisit": 1.0,
    "category_share": 0.5, "sources": 0.1,
}  # fmt: skip
_PRECISION_BEFORE = np.array(
    [500.0 if name.startswith("hour_") else 50.0 if name == "item_new" else 2.0 for name in FEATURES]
)
"""How firmly the weights stand before any label. The hours are held down: outcomes are a TTL old, so in its first days the model
would extrapolate from the hours that it has seen to those that it has not."""

_NEWTON_STEPS = 4
_EDGES = np.linspace(-9.0, 5.0, 57)
_CENTERS = np.concatenate(([_EDGES[0] - 0.125], (_EDGES[1:] + _EDGES[:-1]) / 2, [_EDGES[-1] + 0.125]))
_PSEUDO = 4.0
_TABLE_FADE = 5
"""The reliability table forgets so many times faster than the model: it tells of the forecasts made lately."""
RELIABILITY_EDGES = np.array([0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])


def sigmoid(logits: npt.NDArray[Any]) -> F64:
    """1 / (1 + e^-x) in float64, safe at both ends."""
    odds: F64 = 1.0 / (1.0 + np.exp(-np.clip(np.asarray(logits, np.float64), -40.0, 40.0)))
    return odds


class Asked:
    """The model. `logits` and `calibrated` predict, `learn` takes outcomes; all state goes out by `export` and in by `load`."""

    def __init__(self, half_life: float = 50_000.0) -> None:
        self.half_life = half_life
        self.weights = np.array([_BEFORE.get(name, 0.0) for name in FEATURES])
        self.precision = np.diag(_PRECISION_BEFORE)
        self.labels = 0
        self._seen = np.zeros(len(_CENTERS))
        self._positive = np.zeros(len(_CENTERS))
        self._table = np.zeros((len(RELIABILITY_EDGES) - 1, 3))
        self._fit_calibration()

    def logits(self, rows: F32) -> F64:
        """Uncalibrated logits of feature rows [n, len(FEATURES)]."""
        out: F64 = rows @ self.weights
        return out

    def calibrated(self, logits: F64) -> F64:
        """P(asked) of uncalibrated logits; never falls where the logit rises."""
        return sigmoid(np.interp(logits, _CENTERS, self._calibration) + _beyond(logits))

    def learn(self, rows: F32, labels: npt.NDArray[np.bool_], predicted: F32) -> None:
        """Outcomes of n samples, with the P(asked) that each got at its time: the reliability table is of true forecasts.

        The calibrator counts the logits of the present weights, which have not seen these labels either.
        """
        if not len(rows):
            return
        fade = 0.5 ** (len(rows) / self.half_life)
        self._count(labels, self.logits(rows), predicted, fade)
        self._newton(rows.astype(np.float64), labels.astype(np.float64), fade)
        self.labels += len(rows)

    def reliability(self) -> list[dict[str, float]]:
        """Per bin of the forecast: its bounds, mean forecast, observed share, count (fading)."""
        table = []
        for (count, predicted, positive), low, high in zip(
            self._table.tolist(), RELIABILITY_EDGES[:-1].tolist(), RELIABILITY_EDGES[1:].tolist(), strict=True
        ):
            if count > 0:
                table.append(
                    {
                        "low": low,
                        "high": high,
                        "predicted": predicted / count,
                        "observed": positive / count,
                        "count": count,
                    }
                )
        return table

    def calibration_error(self) -> float:
        """Expected calibration error: mean |forecast - observed| over the reliability table, weighted by count."""
        count, predicted, positive = self._table.T
        return float(np.abs(predicted - positive).sum() / max(1.0, count.sum()))

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """Everything learned, as arrays: for the state and for a bundle's priors."""
        return {
            "asked_weights": self.weights,
            "asked_precision": self.precision,
            "asked_seen": self._seen,
            "asked_positive": self._positive,
            "asked_table": self._table,
            "asked_labels": np.array([self.labels], np.int64),
        }

    def load(self, arrays: Mapping[str, npt.NDArray[Any]], counts: bool = True) -> bool:
        """Take what `export` gave; False (and nothing changes) where it is of another set of features.

        Without `counts` the reliability table and the number of labels stay: they then tell of this run alone.
        """
        if any(name not in arrays or arrays[name].shape != mine.shape for name, mine in self.export().items()):
            return False
        self.weights, self.precision = arrays["asked_weights"].copy(), arrays["asked_precision"].copy()
        self._seen, self._positive = arrays["asked_seen"].copy(), arrays["asked_positive"].copy()
        if counts:
            self._table, self.labels = arrays["asked_table"].copy(), int(arrays["asked_labels"][0])
        self._fit_calibration()
        return True

    def _newton(self, rows: F64, labels: F64, fade: float) -> None:
        """Move to the mode of (faded past) x (batch), and add the batch's curvature to the precision."""
        before = self.weights
        past = self.precision * fade + np.diag(_PRECISION_BEFORE * (1.0 - fade))
        weights = before
        for _ in range(_NEWTON_STEPS):
            p = sigmoid(rows @ weights)
            gradient = rows.T @ (labels - p) - past @ (weights - before)
            curvature = past + (rows.T * (p * (1.0 - p))) @ rows
            step = np.linalg.solve(curvature, gradient)
            weights = weights + step * min(1.0, 2.0 / max(1e-9, float(np.abs(step).max())))
        self.weights, self.precision = weights, curvature

    def _count(self, labels: npt.NDArray[np.bool_], logits: F64, predicted: F32, fade: float) -> None:
        at = np.searchsorted(_EDGES, logits, side="right")
        self._seen = self._seen * fade + np.bincount(at, minlength=len(_CENTERS))
        self._positive = self._positive * fade + np.bincount(at, labels, len(_CENTERS))
        bins = np.clip(np.searchsorted(RELIABILITY_EDGES, predicted, side="right") - 1, 0, len(self._table) - 1)
        rows = np.stack(
            [np.bincount(bins, w, len(self._table)) for w in (np.ones(len(bins)), predicted, labels)], axis=1
        )
        self._table = self._table * fade**_TABLE_FADE + rows
        self._fit_calibration()

    def _fit_calibration(self) -> None:
        count = self._seen + _PSEUDO
        rate = (self._positive + _PSEUDO * sigmoid(_CENTERS)) / count
        rate = np.clip(isotonic(rate, count), 1e-6, 1.0 - 1e-6)
        self._calibration = np.log(rate) - np.log1p(-rate)


def isotonic(values: F64, weights: F64) -> F64:
    """The non-decreasing sequence nearest to `values` in weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, total, length = pools.pop()
            both = total + pool[1]
            pool = ((mean * total + pool[0] * pool[1]) / both, both, length + pool[2])
        pools.append(pool)
    return np.repeat([mean for mean, _, _ in pools], [length for _, _, length in pools])


def _beyond(logits: F64) -> F64:
    """How far a logit lies outside the bins, where the calibrated logit goes on with slope 1."""
    excess: F64 = np.minimum(logits - _CENTERS[0], 0.0) + np.maximum(logits - _CENTERS[-1], 0.0)
    return excess

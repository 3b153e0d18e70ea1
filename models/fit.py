"""The training loop that every torch model here shares: epochs of seeded batches, a look at the tail, the best weights kept.

In: a module, a loss over row groups and a figure on later rows. Out: the module with its best weights, and what happened. The
order of time is the callers' duty: the tail that stops the training lies after every row that is trained on. Never touches global
random state or a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from models.evaluate import Metrics
from models.seeded import state_of, threads

I64 = npt.NDArray[np.int64]
Progress = Callable[[int, int, float], None]
"""Called with (steps done, steps at most, validation log loss so far)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`checks` looks at the tail an epoch, stop after `patience` of them without gain; the rate falls linearly to a tenth."""

    epochs: int = 2
    batch: int = 1024
    """Pairs a step, about."""
    rate: float = 2e-3
    table_decay: float = 0.0
    """Decoupled weight decay of embedding tables, per step and unit of rate."""
    tail: float = 0.1
    """Share of the requests, the newest, that stop the training and are not trained on."""
    checks: int = 2
    patience: int = 2
    threads: int = 1
    """One thread keeps the bytes of the result the same on every machine."""


@dataclass(frozen=True, slots=True)
class TrainReport:
    """`curve`: validation log loss before the first step and at each check; `validation`: all figures of the weights kept."""

    rows: int
    steps: int
    best_step: int
    curve: tuple[float, ...]
    validation: Metrics


def fit(
    net: nn.Module,
    batches: Callable[[np.random.Generator], list[I64]],
    loss: Callable[[I64, np.random.Generator], Tensor],
    validate: Callable[[], Metrics],
    schedule: Schedule,
    seed: int,
    rows: int,
    progress: Progress | None = None,
) -> TrainReport:
    """Train in place. `batches` gives an epoch's batches of request numbers; `loss` of one batch may draw from the generator."""
    source = np.random.default_rng(seed)
    with threads(schedule.threads):
        best, report = state_of(net), validate()
        curve, best_step, step, worse = [report.bce], 0, 0, 0
        optimiser = _optimiser(net, schedule)
        for _ in range(schedule.epochs):
            plan = batches(source)
            most = len(plan) * schedule.epochs
            checks = {round(len(plan) * (i + 1) / schedule.checks) for i in range(schedule.checks)}
            for place, batch in enumerate(plan, start=1):
                for group in optimiser.param_groups:
                    group["lr"] = schedule.rate * (1.0 - 0.9 * step / most)
                optimiser.zero_grad(set_to_none=True)
                loss(batch, source).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                step += 1
                if place not in checks:
                    continue
                now = validate()
                curve.append(now.bce)
                if progress is not None:
                    progress(step, most, now.bce)
                # without a tail there is nothing to choose by: the last weights are kept
                if not now.rows or now.bce < report.bce:
                    best, report, best_step, worse = state_of(net), now, step, 0
                else:
                    worse += 1
                if worse >= schedule.patience:
                    break
            if worse >= schedule.patience:
                break
        net.load_state_dict({name: torch.from_numpy(value) for name, value in best.items()})
    return TrainReport(rows, step, best_step, tuple(curve), report)


def _optimiser(net: nn.Module, schedule: Schedule) -> torch.optim.Optimizer:
    tables = [value for name, value in net.named_parameters() if name.endswith("table")]
    others = [value for name, value in net.named_parameters() if not name.endswith("table")]
    groups = [{"params": tables, "weight_decay": schedule.table_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=schedule.rate, fused=True)


def split_tail(requests: int, tail: float) -> int:
    """How many requests, the oldest, are trained on; at least one stays on each side where there are two."""
    if not tail or requests < 2:
        return requests
    return min(max(1, round(requests * (1.0 - tail))), requests - 1)


def epoch_batches(counts: I64, size: int, source: np.random.Generator) -> list[I64]:
    """Request numbers in random order, cut so that each batch has about `size` pairs (`counts` int64 [r])."""
    order = source.permutation(len(counts))
    ends = np.cumsum(counts[order])
    cuts = np.searchsorted(ends, np.arange(size, int(ends[-1]) if len(ends) else 0, size))
    return [part for part in np.split(order, np.unique(cuts)) if len(part)]

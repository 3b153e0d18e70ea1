"""Training on arrays: the foundation model, its compressor, the ranker. Always in time order, always seeded.

In: rows that a replay of the log wrote. Out: models and reports. The newest requests are held back to stop the training; nothing is
split at random. The ranker is trained with the vectors it really had, as stale and as often missing as in serving (trained at full
coverage and tested at .43 it kept a quarter of the gain), and a tenth of them is dropped, so that an outage of the FM costs little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce_with_logits

from models.compressor import Compressor, CompressorConfig, floored_std
from models.encoders import ROWS_MAX, autoencoder, principal, random_projection
from models.evaluate import Metrics, evaluate
from models.features import F32, I64, Features, Vectors, no_vectors, pair_starts, take_requests
from models.fit import Progress, Schedule, TrainReport, epoch_batches, fit, split_tail
from models.foundation import ITEM_TABLES, FmConfig, FoundationModel
from models.ranker import Ranker, RankerConfig, RankerNet
from models.rows import DAY_MS, FmRows, Groups
from models.seeded import State, generator, initialise, load_state, state_of

F64 = npt.NDArray[np.float64]

_VECTOR_GROUPS = 256  # of one pass of foundation_outputs


@dataclass(frozen=True, slots=True)
class FmTraining:
    """`stale_share` of the histories lose their rows newer than a random age up to `stale_ms_max`: a vector is read hours later.

    `anchored`: only what the model knows of single items learns (`ITEM_TABLES`). The maps from there to the shared layer, and the
    heads that read it, stay as they are, so that new vectors mean what the old ones meant.
    """

    schedule: Schedule = field(default_factory=lambda: Schedule(epochs=4, batch=256, rate=5e-3, patience=8))
    stale_share: float = 0.2
    stale_ms_max: int = 4 * 3_600_000
    device: str = "cpu"
    anchored: bool = False


@dataclass(frozen=True, slots=True)
class RankerTraining:
    """`vector_dropout`: share of the vectors of each slot taken as missing. `teacher_weight`: share of the loss that a teacher's
    probabilities take (distillation). `heads` 1: pairs with an exact vector are learned and scored as all others."""

    schedule: Schedule = field(
        default_factory=lambda: Schedule(epochs=3, batch=512, rate=2e-3, table_decay=15.0, patience=4)
    )
    vector_dropout: float = 0.1
    teacher_weight: float = 0.5
    heads: int = 2


def train_foundation(
    rows: FmRows,
    config: FmConfig,
    seed: int,
    training: FmTraining | None = None,
    init: FoundationModel | None = None,
    progress: Progress | None = None,
) -> tuple[FoundationModel, TrainReport]:
    """A foundation model of `rows`, from scratch or from `init` (the daily refresh); the report's figures are of the first task."""
    training = training or FmTraining()
    _check_rows(rows, config)
    model = FoundationModel.untrained(config, seed)
    if init is not None:
        load_state(model, init.state(), "foundation model")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ITEM_TABLES or not training.anchored)
    model.to(training.device)
    trained, starts = split_tail(len(rows.ts), training.schedule.tail), rows.starts
    if init is None and starts[trained]:
        _standardise(model.context_mean, model.context_std, rows.context[: int(starts[trained])])
    groups, tail = Groups.of(starts, 0, trained), Groups.of(starts, trained, len(rows.ts))

    def loss(chosen: I64, source: np.random.Generator) -> Tensor:
        stale = source.random(len(chosen)) < training.stale_share
        hide = (stale * source.random(len(chosen)) * training.stale_ms_max).astype(np.int64)
        logits, pairs = _fm_logits(model, rows, groups, chosen, hide, training.device)[1:]
        labels = torch.from_numpy(rows.labels[pairs]).to(training.device)
        known = ~labels.isnan()
        return bce_with_logits(logits[known], labels[known])

    def validate() -> Metrics:
        pairs = slice(int(starts[trained]), len(rows.request))
        return evaluate(_fm_outputs(model, rows, tail, training.device)[1][pairs, 0], rows.labels[pairs, 0])

    report = fit(
        model,
        lambda source: epoch_batches(groups.count, training.schedule.batch, source),
        loss,
        validate,
        training.schedule,
        seed,
        int(starts[trained]),
        progress,
    )
    return model.eval().requires_grad_(False), report


def foundation_outputs(
    model: FoundationModel,
    rows: FmRows,
    device: str = "cpu",
    age_ms: I64 | None = None,
    chosen: npt.NDArray[np.bool_] | None = None,
) -> tuple[F32, F64]:
    """Vectors float32 [n, D] and probabilities float64 [n, tasks] of every pair, from histories as they were `age_ms` int64 [r]
    before the request (None: fresh). `chosen` bool [r]: requests to compute; the pairs of the others are zeros."""
    groups = Groups.of(rows.starts, 0, len(rows.ts))
    if chosen is not None:
        mine = chosen[groups.request]
        groups = Groups(groups.request[mine], groups.start[mine], groups.count[mine])
    return _fm_outputs(model, rows, groups, device, age_ms)


def fit_compressor(
    vectors: F32, config: CompressorConfig | None = None, seed: int = 0
) -> tuple[Compressor, dict[str, float]]:
    """A compressor of float32 [n, D] and its report: `error` of the round trip as a share of the variance, `rows`, `refused`."""
    config = config or CompressorConfig(dims=vectors.shape[1])
    if vectors.ndim != 2 or vectors.shape[1] != config.dims:
        raise ValueError(f"vectors are {list(vectors.shape)}, the compressor's configuration says [n, {config.dims}]")
    usable = vectors[np.isfinite(vectors).all(axis=1) & (vectors != 0).any(axis=1)].astype(np.float32)
    if len(usable) < 2:
        raise ValueError(f"{len(usable)} usable vectors of {len(vectors)}; a compressor needs at least 2")
    figures: State = {"mean": usable.mean(0, dtype=np.float64).astype(np.float32), "std": floored_std(usable)}
    plain = {"code_mean": np.zeros(config.d, np.float32), "code_std": np.ones(config.d, np.float32)}
    blank = Compressor(config, {**random_projection(config.dims, config.d, seed), **figures, **plain})
    inputs = blank.standardise(usable)
    if config.kind == "autoencoder":
        layers = autoencoder(inputs, config.d, config.hidden, config.epochs, seed)
    elif config.kind == "pca":
        layers = principal(inputs, config.d)
    else:
        layers = random_projection(config.dims, config.d, seed)
    raw = Compressor(config, {**layers, **figures, **plain}).codes(usable)
    codes = {"code_mean": raw.mean(0, dtype=np.float64).astype(np.float32), "code_std": floored_std(raw)}
    compressor = Compressor(config, {**layers, **figures, **codes})
    sample = usable[:: max(1, len(usable) // ROWS_MAX)]
    refused = float(len(vectors) - len(usable))
    return compressor, {"error": compressor.error(sample), "rows": float(len(usable)), "refused": refused}


def train_ranker(
    features: Features,
    vectors: Vectors | None,
    labels: F32,
    config: RankerConfig,
    seed: int,
    training: RankerTraining | None = None,
    init: Ranker | None = None,
    teacher: npt.NDArray[np.floating] | None = None,
    progress: Progress | None = None,
) -> tuple[Ranker, TrainReport]:
    """A ranker of n pairs in time order with their vectors (None: none, for the base), from scratch or from `init`.

    `labels` float32 [n] (NaN = left out). `teacher` float [n]: probabilities to distil from (NaN = none for that row).
    """
    training = training or RankerTraining()
    net = RankerNet(config)
    initialise(net, generator(seed))
    requests = len(features.user_bucket)
    if vectors is None or not config.vectors:
        vectors = no_vectors(len(features.request), requests, config.d)
    starts = pair_starts(features)
    trained = split_tail(requests, training.schedule.tail)
    edge = int(starts[trained])
    if init is not None:
        load_state(net, init.state(), "ranker")  # with the old standardisation: its weights were made for it
    elif edge:
        _standardise(net.dense_mean, net.dense_std, features.dense[:edge])
    tail, tail_vectors, _ = take_requests(features, vectors, np.arange(trained, requests), starts)
    loss = _ranker_loss(net, features, vectors, labels, teacher, starts, training)

    def made() -> Ranker:
        ranker = Ranker(config, state_of(net))
        return ranker.one_headed() if training.heads == 1 else ranker

    def validate() -> Metrics:
        return evaluate(made().score_many(tail, tail_vectors), labels[edge:])

    report = fit(
        net,
        lambda source: epoch_batches(np.diff(starts[: trained + 1]), training.schedule.batch, source),
        loss,
        validate,
        training.schedule,
        seed,
        edge,
        progress,
    )
    return made(), report


def _ranker_loss(
    net: RankerNet,
    features: Features,
    vectors: Vectors,
    labels: F32,
    teacher: npt.NDArray[np.floating] | None,
    starts: I64,
    training: RankerTraining,
) -> Callable[[I64, np.random.Generator], Tensor]:
    weight = training.teacher_weight if teacher is not None else 0.0

    def loss(chosen: I64, source: np.random.Generator) -> Tensor:
        batch, had, pairs = take_requests(features, vectors, chosen, starts)
        had = drop_vectors(had, training.vector_dropout, source)
        head = torch.from_numpy((had.exact_age_ms >= 0).astype(np.int64)) * (training.heads - 1)
        logits = net(batch, had).gather(1, head[:, None])[:, 0]
        wanted = torch.from_numpy(labels[pairs].astype(np.float32))
        known = ~wanted.isnan()
        total = (1.0 - weight) * bce_with_logits(logits[known], wanted[known])
        if teacher is not None:
            soft = torch.from_numpy(teacher[pairs].astype(np.float32))
            taught = ~soft.isnan()
            if taught.any():
                total = total + weight * bce_with_logits(logits[taught], soft[taught])
        return total

    return loss


def drop_vectors(vectors: Vectors, share: float, source: np.random.Generator) -> Vectors:
    """The same vectors with a share of each slot taken as missing."""

    def dropped(ages: I64) -> I64:
        return np.where(source.random(len(ages)) < share, np.int64(-1), ages)

    return replace(
        vectors,
        exact_age_ms=dropped(vectors.exact_age_ms),
        user_age_ms=dropped(vectors.user_age_ms),
        neighbor_age_ms=dropped(vectors.neighbor_age_ms),
    )


def _standardise(mean: Tensor, std: Tensor, values: F32) -> None:
    """Fill two buffers with the columns' figures; a column that hardly moves is not blown up."""
    mean.copy_(torch.from_numpy(values.mean(0, dtype=np.float64)))
    std.copy_(torch.from_numpy(np.maximum(values.std(0, dtype=np.float64), 0.05)))


def _check_rows(rows: FmRows, config: FmConfig) -> None:
    if rows.labels.shape != (len(rows.request), len(config.tasks)):
        raise ValueError(
            f"labels are {list(rows.labels.shape)}; {len(rows.request)} pairs and the tasks {', '.join(config.tasks)} are wanted"
        )
    if (np.diff(rows.ts) < 0).any() or (np.diff(rows.request) < 0).any():
        raise ValueError("rows are not in time order: `ts` and `request` must never fall")
    if rows.context.shape != (len(rows.request), config.context_dims):
        raise ValueError(
            f"context is {list(rows.context.shape)}, the configuration says {config.context_dims} numbers a pair"
        )
    if rows.content.shape[1] != config.content_dims:
        raise ValueError(f"content has {rows.content.shape[1]} numbers, the configuration says {config.content_dims}")


def _fm_logits(
    model: FoundationModel, rows: FmRows, groups: Groups, chosen: I64, hide_ms: I64, device: str
) -> tuple[Tensor, Tensor, I64]:
    """Vectors [k, D] and logits [k, tasks] of the k pairs of the chosen groups, and their rows int64 [k]."""
    pairs, request = groups.pairs(chosen), groups.request[chosen]
    there = pairs >= 0
    shown = np.where(there, rows.item[pairs], 0)
    vectors = model.embed(rows.histories(request, hide_ms, device), rows.columns(shown, device))
    hours = torch.from_numpy((rows.ts[request] % DAY_MS / 3_600_000.0).astype(np.float32)).to(device)
    mask = torch.from_numpy(there).to(device)
    real = vectors[mask]  # [k, D]
    context = torch.from_numpy(rows.context[pairs[there]]).to(device)
    return real, model.tasks(real, hours[:, None].expand(there.shape)[mask], context), pairs[there]


def _fm_outputs(
    model: FoundationModel, rows: FmRows, groups: Groups, device: str, age_ms: I64 | None = None
) -> tuple[F32, F64]:
    n = len(rows.request)
    vectors, chances = np.zeros((n, model.config.dims), np.float32), np.zeros((n, len(model.config.tasks)))
    ages = np.zeros(len(rows.ts), np.int64) if age_ms is None else age_ms
    with torch.inference_mode():
        for low in range(0, len(groups.request), _VECTOR_GROUPS):
            chosen = np.arange(low, min(low + _VECTOR_GROUPS, len(groups.request)))
            made, logits, pairs = _fm_logits(model, rows, groups, chosen, ages[groups.request[chosen]], device)
            vectors[pairs], chances[pairs] = made.cpu().numpy(), logits.double().sigmoid().cpu().numpy()
    return vectors, chances

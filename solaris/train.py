"""From a log to a bundle, in one pass over event time: no row is trained on before it has happened.

In: a log, the span to train on, the settings of serving. Out: a bundle and a report. Never: a random split, or a vector that the FM
could not have written at that time.

    [first, warm)    replay without an FM: rows for the FM, for the first ranker, for the catalogue of priors
    at `warm`        train the FM, fit the compressor (which fixes the embedding space), train a first ranker without vectors
    [warm, until)    replay of the whole path, vectors with the ages that serving would see. With `refresh_ms`, the FM learns
                     each such span once it is over (prequential: vectors are written before their span is learned). Off by
                     default: the shared layer drifts, and a ranker trained on all versions misreads the last (docs/log.md)
    at `until`       train the ranker on the rows of [warm, until), and beside it the base ranker on the same rows without vectors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from models.bundle import Bundle
from models.compressor import Compressor, CompressorConfig
from models.engine import Engine
from models.evaluate import Metrics, evaluate
from models.features import DENSE, F32, Features, Vectors, pair_starts, take_requests
from models.fit import Schedule
from models.foundation import FmConfig, FoundationModel
from models.priors import Priors
from models.ranker import Ranker, RankerConfig
from models.train import (
    FmTraining,
    RankerTraining,
    fit_compressor,
    foundation_outputs,
    train_foundation,
    train_ranker,
)
from schemas.errors import BadRecord, SolarisError, UsageError
from schemas.inference import Embeddings, FmRequest
from schemas.log import Log
from streams.feed import Feed
from streams.items import ItemIndex
from streams.pipeline import FmModel, Pipeline, PipelineCounts
from streams.predict import PredictConfig
from streams.rows import Collector, Recorder
from streams.serve import Serve, ServeConfig
from streams.speculate import Speculate, SpeculateConfig
from streams.state.memory import MemoryStore
from streams.state.store import Store
from streams.verify import VerifyConfig

DAY_MS = 24 * 3_600_000
REQUESTS_MIN = 40
"""Fewer requests than this in either part train nothing worth a name."""
SPACE_SEED_ROWS = 20_000
FM_SCHEDULE = Schedule(epochs=3, batch=256, rate=5e-3, patience=3)
"""Small steps: on 105,000 generated pairs the held-out log loss is .4034, against .4060 with batches of 1,024 at 2e-3."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainConfig:
    """`until_ts`: end of training, exclusive. `warm_share`: share of the training requests before the first vector.

    `allow_no_gain`: give a bundle whose FM is no better than the ranker, instead of an error.
    """

    until_ts: int = 2**62
    allow_no_gain: bool = False
    warm_share: float = 0.5
    seed: int = 1
    device: str = "cpu"
    d: int = 16
    slice_ms: int = 30_000
    refresh_ms: int = 0
    fm: FmModel = field(default_factory=FmModel)
    serve: ServeConfig = field(default_factory=ServeConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    verify: VerifyConfig = field(default_factory=lambda: VerifyConfig(pairs_per_ranked=4.0))


@dataclass(frozen=True)
class TrainReport:
    """What came of it, on the newest tenth of the training requests, which no model was trained on."""

    requests: int
    pairs: int
    coverage: dict[str, float]
    fm_pairs_per_ranked: float
    base: Metrics
    solaris: Metrics
    fm: Metrics
    compressor_error: float

    def metrics(self) -> dict[str, float]:
        """The figures for the bundle's manifest."""
        figures = {"bce_base": self.base.bce, "bce_solaris": self.solaris.bce, "bce_fm": self.fm.bce}
        figures |= {"auc_base": self.base.auc, "auc_solaris": self.solaris.auc, "auc_fm": self.fm.auc}
        figures |= {"ece_base": self.base.ece, "ece_solaris": self.solaris.ece}
        figures |= {f"coverage_{tier}": share for tier, share in self.coverage.items()}
        figures |= {"fm_pairs_per_ranked": self.fm_pairs_per_ranked, "compressor_error": self.compressor_error}
        return {name: round(value, 6) for name, value in figures.items() if np.isfinite(value)}


class Trainer:
    """One training run; `say` is told of each step. `run` is the whole story, the methods below it its steps in order."""

    def __init__(self, log: Log, config: TrainConfig, say: Say = lambda _: None) -> None:
        self._log, self._config, self._say = log, config, say
        self._items = list(log.items())
        self._content = next((len(item.content) for item in self._items if item.content), 0)
        self.index = ItemIndex(content_dims=self._content)
        self.index.update([(str(item.item_id), item) for item in self._items])
        self._times = [int(r.ts or 0) for r in takewhile(lambda r: int(r.ts or 0) < config.until_ts, log.requests())]
        if len(self._times) < 2 * REQUESTS_MIN:
            raise UsageError(
                f"{log.folder} has {len(self._times)} requests before the end of training; 80 or more are needed"
            )
        self.warm_ts = self._times[int(len(self._times) * config.warm_share)]
        self._tasks = ("positive", "second") if next(iter(log.requests())).labels2 is not None else ("positive",)
        self._recorder = Recorder()
        self._collector = Collector(self.index, self._recorder, config.serve.history_rows_max, len(self._tasks))

    def run(self) -> tuple[Bundle, TrainReport]:
        """Train everything. Raises `SolarisError` where the FM is no better than the ranker: there is nothing to carry over."""
        pipeline, speculate = self._wired()
        feed = Feed(1, self._config.slice_ms)
        slices = feed.slices(self._log.events(), self._log.requests())
        self._say(f"replaying {len(self._times):,} requests; the first {self._config.warm_share:.0%} without an FM")
        pipeline.answer_from = 2**62
        ahead = None
        for piece in slices:
            if piece.first_ts >= self.warm_ts:
                ahead = piece
                break
            pipeline.step(piece)
        warm_rows = len(self._collector)
        foundation, compressor, error = self._foundation()
        base = self._first_ranker()
        self._recorder.ranker = base
        speculate = self._speculate(speculate.store, speculate.priors())
        pipeline.speculates, pipeline.answer_from = [speculate], 0
        fm = _Refreshed(self, foundation, compressor)
        pipeline.embed = fm.embed
        before = replace(pipeline.counts, tiers=dict(pipeline.counts.tiers))
        self._say("replaying the rest with vectors")
        due = self.warm_ts + self._config.refresh_ms if self._config.refresh_ms else self._config.until_ts
        while ahead is not None and ahead.first_ts < self._config.until_ts:
            if ahead.first_ts >= due:
                fm.refresh()
                due += self._config.refresh_ms
            pipeline.step(ahead)
            ahead = next(slices, None)
        return self._finish(pipeline, before, speculate, fm, base, warm_rows, error)

    def _wired(self) -> tuple[Pipeline, Speculate]:
        config = self._config
        serving = replace(config.serve, shadow=False)
        serve = Serve(0, "", self._recorder, None, 0, config.d, serving, MemoryStore(), self.index)
        speculate = self._speculate(MemoryStore(), None)

        def nothing(requests: Sequence[FmRequest], offsets: Sequence[int]) -> list[Embeddings | BadRecord]:
            raise AssertionError(f"{len(requests)} requests at {list(offsets)[:3]} before there is an FM")

        return Pipeline([serve], [speculate], nothing, config.fm, before_rank=self._collector.before), speculate

    def _speculate(self, store: Store, priors: Priors | None) -> Speculate:
        """Speculation over a store; made anew when the first ranker is there, because it keeps that ranker's item vectors."""
        config, serve = self._config, self._config.serve
        spec = SpeculateConfig(
            ttl_ms=serve.ttl_ms, history_rows_max=serve.history_rows_max, shown_rows_max=serve.shown_rows_max,
            seed=config.seed, predict=config.predict, verify=config.verify,
        )  # fmt: skip
        return Speculate(0, self._recorder, priors, 0, spec, store, self.index, 1)

    def _foundation(self) -> tuple[FoundationModel, Compressor, float]:
        """The FM of the warm part, and the compressor that fixes the embedding space."""
        rows = self._collector.fm_rows()
        self._say(f"training the FM on {len(rows.request):,} pairs of {len(rows.ts):,} requests")
        shape = FmConfig(
            tasks=self._tasks, item_buckets=self._buckets(), content_dims=self._content, context_dims=len(DENSE),
            history_rows=self._config.serve.history_rows_max,
        )  # fmt: skip
        training = FmTraining(FM_SCHEDULE, stale_ms_max=max(1, self._config.serve.ttl_ms), device=self._config.device)
        model, report = train_foundation(rows, shape, self._config.seed, training)
        self._say(f"the FM's log loss on its newest tenth: {report.validation.bce:.4f}")
        outputs, _ = foundation_outputs(model, rows, self._config.device)
        compressor, figures = fit_compressor(
            outputs[-SPACE_SEED_ROWS:], CompressorConfig(dims=shape.dims, d=self._config.d)
        )
        return model, compressor, figures["error"]

    def _first_ranker(self) -> Ranker:
        """A ranker without vectors: what the verifier asks during the replay, and where both later rankers start."""
        features, _vectors, labels = self._collector.columns()
        shape = self._ranker_config()
        ranker, report = train_ranker(features, None, labels[:, 0], shape, self._config.seed)
        self._say(f"the ranker without vectors on the same: {report.validation.bce:.4f}")
        return ranker

    def _finish(
        self,
        pipeline: Pipeline,
        before: PipelineCounts,
        speculate: Speculate,
        fm: _Refreshed,
        base: Ranker,
        warm: int,
        error: float,
    ) -> tuple[Bundle, TrainReport]:
        features, vectors, labels = self._collector.columns()
        requests = len(features.user_bucket)
        if requests - warm < REQUESTS_MIN:
            raise UsageError(
                f"only {requests - warm} requests are left after the warm part; lower warm_share or give more days"
            )
        self._say(f"training the ranker on {requests - warm:,} requests with their vectors, and all before without")
        late, late_vectors, late_labels = _tail(features, vectors, labels[:, 0], warm)
        init = base.widened()
        ranker, _ = train_ranker(
            late, late_vectors, late_labels, init.config, self._config.seed, RankerTraining(), init
        )
        plain, _ = train_ranker(late, None, late_labels, base.config, self._config.seed, RankerTraining(), base)
        held = warm + int((requests - warm) * (1 - Schedule().tail))
        report = self._judge(features, vectors, labels, held, ranker, plain, fm, _since(pipeline.counts, before), error)
        if report.fm.bce >= report.base.bce and not self._config.allow_no_gain:
            raise SolarisError(
                f"the FM (log loss {report.fm.bce:.4f}) is no better than the ranker without it ({report.base.bce:.4f}) on "
                "held-out requests: there is no gain to carry over. Give it more days, or a log with more history a user, or "
                "(for a trial of the pipes) --allow-no-gain"
            )
        parts = {
            "ranker": ranker, "base": plain, "foundation": fm.model, "compressor": fm.compressor, "priors": speculate.priors(),
        }  # fmt: skip
        window = {"from_ms": self._log.manifest.first_ts, "to_ms": self._times[-1]}
        return Bundle.build(parts, training=window, metrics=report.metrics()), report

    def _judge(
        self, features: Features, vectors: Vectors, labels: F32, held: int, ranker: Ranker, plain: Ranker, fm: _Refreshed,
        counts: PipelineCounts, error: float,
    ) -> TrainReport:  # fmt: skip
        """All three on the newest requests, which stopped the training and were not trained on; the FM as it was before them."""
        tail, had, wanted = _tail(features, vectors, labels[:, 0], held)
        rows = self._collector.fm_rows(held)
        before = fm.before(int(rows.ts[0]))
        _, chances = foundation_outputs(before, rows, self._config.device)
        return TrainReport(
            len(self._collector), len(features.request), counts.coverage(), counts.fm_pairs / max(1, counts.ranked_pairs),
            evaluate(plain.score_many(tail, None), wanted), evaluate(ranker.score_many(tail, had), wanted),
            evaluate(chances[:, 0], wanted), error,
        )  # fmt: skip

    def _ranker_config(self) -> RankerConfig:
        return RankerConfig(vectors=False, d=self._config.d, content_dims=self._content, item_buckets=self._buckets())

    def _buckets(self) -> int:
        """A table of about eight rows an item, a power of two."""
        return 1 << min(17, max(12, int(np.ceil(np.log2(8 * max(1, len(self.index)))))))


class _Refreshed:
    """The FM of the replay: the same embedding space all along, refreshed on each day once that day is over."""

    def __init__(self, trainer: Trainer, model: FoundationModel, compressor: Compressor) -> None:
        self._trainer, self.model, self.compressor = trainer, model, compressor
        self._seen = len(trainer._collector)
        self._history: list[tuple[int, FoundationModel]] = [(0, model)]
        self._engine = self._made()

    def embed(self, requests: Sequence[FmRequest], offsets: Sequence[int]) -> list[Embeddings | BadRecord]:
        """Embed with the FM as it is now."""
        return self._engine.embed(requests, offsets)

    def refresh(self) -> None:
        """Learn what has happened since the last time, from the present weights."""
        rows = self._trainer._collector.fm_rows(self._seen)
        config = self._trainer._config
        if len(rows.ts) < REQUESTS_MIN:
            return
        schedule = Schedule(epochs=1, rate=1e-3, tail=0.0)
        training = FmTraining(schedule=schedule, stale_ms_max=max(1, config.serve.ttl_ms), device=config.device)
        self.model, _ = train_foundation(rows, self.model.config, config.seed, training, self.model)
        self._seen = len(self._trainer._collector)
        self._history.append((int(rows.ts[-1]) + 1, self.model))
        self._engine = self._made()

    def before(self, ts: int) -> FoundationModel:
        """The newest FM that has learned nothing at or after `ts`."""
        return next(model for since, model in reversed(self._history) if since <= ts)

    def _made(self) -> Engine:
        bundle = Bundle.build({"foundation": self.model, "compressor": self.compressor}, name=_REPLAY_SPACE)
        return _AnySpace(bundle, self._trainer.index, self._trainer._config.device)


_REPLAY_SPACE = "replay"


class _AnySpace(Engine):
    """An engine for the replay's space 0, which has no name yet."""

    def __init__(self, bundle: Bundle, items: ItemIndex, device: str) -> None:
        super().__init__(bundle, items, device)
        self.space = 0


def _tail(features: Features, vectors: Vectors, labels: F32, first: int) -> tuple[Features, Vectors, F32]:
    """The requests from number `first` on."""
    taken, had, pairs = take_requests(
        features, vectors, np.arange(first, len(features.user_bucket)), pair_starts(features)
    )
    return taken, had, labels[pairs]


def _since(counts: PipelineCounts, before: PipelineCounts) -> PipelineCounts:
    tiers = {tier: count - before.tiers[tier] for tier, count in counts.tiers.items()}
    return replace(
        counts,
        ranked_pairs=counts.ranked_pairs - before.ranked_pairs,
        fm_pairs=counts.fm_pairs - before.fm_pairs,
        tiers=tiers,
    )

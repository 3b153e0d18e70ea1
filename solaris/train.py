"""From a log to a bundle, in one pass over event time: no row is trained on before it has happened.

In: a log, the span to train on, the settings of serving. Out: a bundle and a report. Never: a random split, or a vector that the FM
could not have written at that time.

    [first, warm)    replay without an FM: rows for the FM, for the first ranker, for the catalogue of priors
    at `warm`        train the FM, fit the compressor (which fixes the embedding space), train a first ranker without vectors
    [warm, until)    replay of the whole path, vectors with the ages that serving would see. The FM learns each `refresh_ms` once
                     it is over (prequential: vectors are written before their span is learned), in the same embedding space:
                     only what it knows of single items moves
    at `until`       train the ranker on the rows of [warm, until), and beside it the base ranker on the same rows without vectors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from models.bundle import Bundle
from models.compressor import CompressorConfig
from models.evaluate import Metrics, evaluate
from models.features import DENSE, F32, Features, Vectors, take_requests
from models.fit import Schedule, split_tail
from models.foundation import FmConfig
from models.priors import Priors
from models.ranker import Ranker, RankerConfig
from models.rows import FmRows
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
from solaris.refreshed import REFRESH, Refreshed
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
FM_SCHEDULE = Schedule(epochs=4, batch=256, rate=5e-3, patience=8)
"""It is steps that the FM lacks first: on 157,000 generated pairs 554 steps give .3833, 2,216 give .3747 (docs/log.md)."""

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
    refresh_ms: int = DAY_MS
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


@dataclass(frozen=True)
class Replayed:
    """r requests with n pairs as the replay saw them; `warm` of the requests came before the first vector. `labels` float32
    [n, tasks]; `counts` are of the rest; `base` is the ranker of the warm part, without vectors; `error` the compressor's."""

    features: Features
    vectors: Vectors
    labels: F32
    rows: FmRows
    warm: int
    fm: Refreshed
    base: Ranker
    priors: Priors
    counts: PipelineCounts
    error: float

    def requests(self, first: int, last: int) -> tuple[Features, Vectors, F32]:
        """Features, vectors and labels of the requests [first, last)."""
        taken, had, pairs = take_requests(self.features, self.vectors, np.arange(first, last), self.rows.starts)
        return taken, had, self.labels[pairs]


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
        self._collector = Collector(self.index, self._recorder, len(self._tasks))

    def run(self) -> tuple[Bundle, TrainReport]:
        """Train everything. Raises `SolarisError` where the FM is no better than the ranker: there is nothing to carry over."""
        return self._finish(self.replay())

    def replay(self) -> Replayed:
        """The log up to `until_ts` through the whole path: the rows that serving would have seen, the FM that wrote vectors."""
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
        warm, seen = len(self._collector), len(self._collector)
        fm, error = self._foundation()
        base = self._first_ranker()
        self._recorder.ranker = base
        speculate = self._speculate(speculate.store, speculate.priors())
        pipeline.speculates, pipeline.answer_from = [speculate], 0
        pipeline.embed = fm.embed
        before = replace(pipeline.counts, tiers=dict(pipeline.counts.tiers))
        self._say("replaying the rest with vectors")
        due = self.warm_ts + (self._config.refresh_ms or 2**62)
        while ahead is not None and ahead.first_ts < self._config.until_ts:
            if ahead.first_ts >= due:
                if len(self._collector) - seen >= REQUESTS_MIN:
                    fm.refresh(self._collector.fm_rows(seen))
                    seen = len(self._collector)
                due += self._config.refresh_ms
            pipeline.step(ahead)
            ahead = next(slices, None)
        rows, columns = self._collector.fm_rows(), self._collector.columns()
        return Replayed(*columns, rows, warm, fm, base, speculate.priors(), _since(pipeline.counts, before), error)

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

    def _foundation(self) -> tuple[Refreshed, float]:
        """The FM of the warm part with the compressor that fixes the embedding space, and that compressor's error."""
        rows, config = self._collector.fm_rows(), self._config
        self._say(f"training the FM on {len(rows.request):,} pairs of {len(rows.ts):,} requests")
        shape = FmConfig(
            tasks=self._tasks, item_buckets=self._buckets(), content_dims=self._content, context_dims=len(DENSE),
            history_rows=config.serve.history_rows_max + config.serve.shown_rows_max,
        )  # fmt: skip
        training = FmTraining(FM_SCHEDULE, stale_ms_max=max(1, config.serve.ttl_ms), device=config.device)
        model, report = train_foundation(rows, shape, config.seed, training)
        self._say(f"the FM's log loss on its newest tenth: {report.validation.bce:.4f}")
        outputs, _ = foundation_outputs(model, rows, config.device)
        compressor, figures = fit_compressor(outputs[-SPACE_SEED_ROWS:], CompressorConfig(dims=shape.dims, d=config.d))
        daily = replace(training, schedule=REFRESH, anchored=True)
        return Refreshed(model, compressor, self.index, daily, config.seed), figures["error"]

    def _first_ranker(self) -> Ranker:
        """A ranker without vectors: what the verifier asks during the replay, and where both later rankers start."""
        features, _vectors, labels = self._collector.columns()
        shape = self._ranker_config()
        ranker, report = train_ranker(features, None, labels[:, 0], shape, self._config.seed)
        self._say(f"the ranker without vectors on the same: {report.validation.bce:.4f}")
        return ranker

    def _finish(self, made: Replayed) -> tuple[Bundle, TrainReport]:
        requests = len(made.features.user_bucket)
        if requests - made.warm < REQUESTS_MIN:
            raise UsageError(
                f"only {requests - made.warm} requests are left after the warm part; lower warm_share or give more days"
            )
        self._say(f"training the ranker on {requests - made.warm:,} requests with their vectors")
        late, had, labels = made.requests(made.warm, requests)
        init = made.base.widened()
        ranker, _ = train_ranker(late, had, labels[:, 0], init.config, self._config.seed, RankerTraining(), init)
        plain, _ = train_ranker(
            late, None, labels[:, 0], made.base.config, self._config.seed, RankerTraining(), made.base
        )
        report = self._judge(made, made.warm + split_tail(requests - made.warm, Schedule().tail), ranker, plain)
        if report.fm.bce >= report.base.bce and not self._config.allow_no_gain:
            raise SolarisError(
                f"the FM (log loss {report.fm.bce:.4f}) is no better than the ranker without it ({report.base.bce:.4f}) on "
                "held-out requests: there is no gain to carry over. Give it more days, or a log with more history a user, or "
                "(for a trial of the pipes) --allow-no-gain"
            )
        parts = {
            "ranker": ranker, "base": plain, "foundation": made.fm.model, "compressor": made.fm.compressor, "priors": made.priors,
        }  # fmt: skip
        window = {"from_ms": self._log.manifest.first_ts, "to_ms": self._times[-1]}
        return Bundle.build(parts, training=window, metrics=report.metrics()), report

    def _judge(self, made: Replayed, held: int, ranker: Ranker, plain: Ranker) -> TrainReport:
        """All three on the newest requests, which stopped the training and were not trained on; the FM as it was before them."""
        tail, had, labels = made.requests(held, len(made.rows.ts))
        wanted, rows = labels[:, 0], self._collector.fm_rows(held)
        chances = made.fm.outputs(rows)[1][:, 0]
        counts = made.counts
        return TrainReport(
            len(made.rows.ts), len(made.features.request), counts.coverage(), counts.fm_pairs / max(1, counts.ranked_pairs),
            evaluate(plain.score_many(tail, None), wanted), evaluate(ranker.score_many(tail, had), wanted),
            evaluate(chances, wanted), made.error,
        )  # fmt: skip

    def _ranker_config(self) -> RankerConfig:
        return RankerConfig(vectors=False, d=self._config.d, content_dims=self._content, item_buckets=self._buckets())

    def _buckets(self) -> int:
        """A table of about eight rows an item, a power of two."""
        return 1 << min(17, max(12, int(np.ceil(np.log2(8 * max(1, len(self.index)))))))


def _since(counts: PipelineCounts, before: PipelineCounts) -> PipelineCounts:
    tiers = {tier: count - before.tiers[tier] for tier, count in counts.tiers.items()}
    return replace(
        counts,
        ranked_pairs=counts.ranked_pairs - before.ranked_pairs,
        fm_pairs=counts.fm_pairs - before.fm_pairs,
        tiers=tiers,
    )

"""What share of ranked pairs finds a vector: speculation beside computing what was missed, and beside buying what is popular.

    python -m benches.coverage [--quick] [--full] [--log generated|taobao|both] [--profile]

The pipeline on a generated log, and on the first days of Taobao's with constructed requests where the file is there: one row a
policy, TTL and number of partitions, at no more than 4 FM pairs a ranked pair, over everything after the first 24 hours.
`reactive` is the baseline (a pair that missed is computed for the next time), `popular` buys popular items for whoever comes; both
have the same budget. Beside them the ceiling: the share of pairs whose item anybody had touched or been shown before the request;
no policy can be exact beyond it.

Coverage does not depend on the vectors' values, so a constant one stands for the FM, with 2 s of latency. What is bought does
depend on the ranker: `speculative` asks one that was trained on the first 24 hours, without vectors; `by P(asked)` asks none. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from models.features import DENSE, F32, I32, Features, Vectors
from models.fit import Schedule
from models.ranker import Ranker, RankerConfig
from models.train import RankerTraining, train_ranker
from schemas.events import Event
from schemas.inference import SOURCES, Embeddings, FmRequest
from schemas.log import Log, LoggedRequest, merge
from schemas.ranking import TIERS
from solaris.generate import generate
from solaris.importers.importer import import_log
from solaris.world import DAY_MS, HOUR_MS, GenerateConfig
from streams.feed import Feed
from streams.items import ItemIndex
from streams.pipeline import Pipeline, PipelineCounts
from streams.predict import PredictConfig
from streams.rows import Collector, Recorder
from streams.serve import Serve, ServeConfig
from streams.speculate import Speculate, SpeculateConfig
from streams.state.memory import MemoryStore
from streams.verify import VerifyConfig

TAOBAO = Path(__file__).resolve().parents[2] / "shared/data/taobao/UserBehavior.csv.gz"
D, WARM_MS, SLICE_MS, PAIRS_PER_RANKED = 16, DAY_MS, 120_000, 4.0
GENERATION_RECORDS = 200
PROCESSES = 2


@dataclass(frozen=True)
class Policy:
    """A row of the table."""

    name: str
    sources: tuple[str, ...] = SOURCES
    value: Literal["uncertainty", "asked"] = "uncertainty"


REACTIVE = Policy("reactive", ("reactive",))
POPULAR = Policy("popular", ("popular",), "asked")
SPECULATIVE = Policy("speculative")
BY_ASKED = Policy("speculative by P(asked)", value="asked")


@dataclass
class Loaded:
    """A log in memory, with its catalogue."""

    name: str
    events: list[Event]
    requests: list[LoggedRequest]
    index: ItemIndex
    content: int

    @property
    def measured_from(self) -> int:
        return int(self.events[0].ts or 0) + WARM_MS


class Unranked:
    """Stands where serve's ranker stands: the order within a result changes no coverage, so nothing is computed."""

    def __init__(self, ranker: Ranker) -> None:
        self._ranker = ranker

    def score(self, features: Features, vectors: Vectors | None = None) -> Any:  # noqa: ARG002 - a ranker's signature
        return np.zeros(len(features.request))

    score_many = score

    def item_vectors(self, bucket: I32, category: I32, content: F32) -> F32:
        return self._ranker.item_vectors(bucket, category, content)


def load(folder: Path, name: str, days: float) -> Loaded:
    """Read the first days of a log folder."""
    log = Log(folder)
    items = list(log.items())
    content = next((len(item.content) for item in items if item.content), 0)
    index = ItemIndex(content_dims=content)
    index.update([(str(item.item_id), item) for item in items])
    end = log.manifest.first_ts + days * DAY_MS
    events = list(takewhile(lambda event: int(event.ts or 0) < end, log.events()))
    return Loaded(name, events, list(takewhile(lambda line: int(line.ts or 0) < end, log.requests())), index, content)


def first_ranker(log: Loaded) -> Ranker:
    """A ranker without vectors, of the requests before the measured part."""
    recorder = Recorder()
    collector = Collector(log.index, recorder, 1)
    serve = Serve(0, "", recorder, None, 0, D, ServeConfig(), MemoryStore(), log.index)
    pipeline = Pipeline([serve], before_rank=collector.before)
    slices = Feed(1, SLICE_MS).slices(log.events, log.requests)
    for _ in pipeline.run(takewhile(lambda piece: piece.first_ts < log.measured_from, slices)):
        pass
    features, _, labels = collector.columns()
    config = RankerConfig(vectors=False, d=D, content_dims=log.content, item_buckets=1 << 14)
    training = RankerTraining(Schedule(epochs=2, batch=512, rate=3e-3))
    assert features.dense.shape[1] == len(DENSE)
    return train_ranker(features, None, labels[:, 0], config, 1, training)[0]


def constant(requests: Sequence[FmRequest], offsets: Sequence[int]) -> list[Embeddings]:
    """The FM: the same vector for every pair."""
    return [
        Embeddings(r.user, r.space, r.as_of, at, r.items, np.ones(len(r.items), np.float32), np.ones((len(r.items), D), np.int8))
        for r, at in zip(requests, offsets, strict=True)
    ]  # fmt: skip


def run(log: Loaded, ranker: Ranker, policy: Policy, ttl_ms: int, partitions: int) -> dict[str, Any]:
    """One row: the whole log, measured after the warm-up."""
    serving = ServeConfig(ttl_ms=ttl_ms, generation_records=GENERATION_RECORDS)
    predict = PredictConfig(sources=policy.sources)
    verify = VerifyConfig(pairs_per_ranked=PAIRS_PER_RANKED, value=policy.value)
    spec = SpeculateConfig(ttl_ms=ttl_ms, predict=predict, verify=verify)
    numbers, index = range(partitions), log.index
    serves = [Serve(p, "", Unranked(ranker), None, 0, D, serving, MemoryStore(), index) for p in numbers]
    speculates = [Speculate(p, ranker, None, 0, spec, MemoryStore(), index, partitions) for p in numbers]
    pipeline = Pipeline(serves, speculates, constant)
    before, days = PipelineCounts(), []
    started, next_day = time.process_time(), log.measured_from
    for piece in Feed(partitions, SLICE_MS).slices(log.events, log.requests):
        if piece.first_ts >= next_day:
            days.append(_copy(pipeline.counts))
            next_day += DAY_MS
        pipeline.step(piece)
    took = time.process_time() - started
    before, last = days[0], days[-1] if len(days) > 1 else days[0]
    whole, tail = _since(pipeline.counts, before), _since(pipeline.counts, last)
    dropped: dict[str, int] = {}
    for speculate in speculates:
        for reason, count in speculate.stats()["dropped"].items():
            dropped[reason] = dropped.get(reason, 0) + count
    return {
        "policy": policy.name,
        "ttl_h": ttl_ms / HOUR_MS,
        "partitions": partitions,
        **{tier: round(share, 4) for tier, share in whole.coverage().items()},
        "with_fallbacks": round(1 - whole.coverage()["none"], 4),
        "exact_last_day": round(tail.coverage()["exact"], 4),
        "fm_pairs_per_ranked": round(whole.fm_pairs / max(1, whole.ranked_pairs), 3),
        "ranked_pairs": whole.ranked_pairs,
        "cpu_s": round(took, 1),
        "dropped": dropped,
    }


def _copy(counts: PipelineCounts) -> PipelineCounts:
    return replace(counts, tiers=dict(counts.tiers))


def _since(counts: PipelineCounts, before: PipelineCounts) -> PipelineCounts:
    return PipelineCounts(
        ranked_pairs=counts.ranked_pairs - before.ranked_pairs,
        fm_pairs=counts.fm_pairs - before.fm_pairs,
        tiers={tier: counts.tiers[tier] - before.tiers[tier] for tier in TIERS},
    )


def ceiling(log: Loaded) -> float:
    """Share of the measured pairs whose item had been touched or ranked for anybody before: only those can be foreseen."""
    known: set[str] = set()
    pairs = found = 0
    for ts, line in merge(log.events, log.requests):
        if isinstance(line, Event):
            known.add(str(line.item_id))
            continue
        names = {str(name) for name in line.candidates}
        if ts >= log.measured_from:
            pairs += len(names)
            found += len(names & known)
        known |= names
    return found / max(1, pairs)


class Row(NamedTuple):
    """What to run."""

    policy: Policy
    ttl_ms: int
    partitions: int


def rows(name: str, options: argparse.Namespace) -> list[Row]:
    """A log's table, the target's row first, the baseline second."""
    long, short = 24 * HOUR_MS, 4 * HOUR_MS
    made = [Row(SPECULATIVE, long, 1), Row(REACTIVE, long, 1)]
    if options.quick:
        return made
    made += [Row(SPECULATIVE, short, 1), Row(REACTIVE, short, 1)]
    if name == "generated" or options.full:
        made += [Row(BY_ASKED, long, 1), Row(POPULAR, long, 1), Row(SPECULATIVE, long, 4), Row(REACTIVE, long, 4)]
    if options.full:
        made += [Row(BY_ASKED, short, 1), Row(POPULAR, short, 1), Row(SPECULATIVE, long, 16), Row(REACTIVE, long, 16)]
    return made


def table(log: Loaded, options: argparse.Namespace) -> dict[str, Any]:
    """Run the rows, each in a process of its own that starts from the log as it was loaded; print them."""
    started = time.process_time()
    ranker = first_ranker(log)
    print(f"\n{log.name}: {len(log.events):,} events, {len(log.requests):,} requests", end="; ")
    print(f"ranker of the first 24 h trained in {time.process_time() - started:.1f} s CPU")
    limit = ceiling(log)
    print(f"ceiling of exact: {limit:.1%} (items that anybody had met before the request)")
    heads = (
        ("TTL", 5),
        ("parts", 6),
        ("exact", 8),
        ("user", 7),
        ("neigh.", 7),
        ("none", 7),
        ("last day", 9),
        ("FM/pair", 8),
    )
    print(f"{'policy':<24}" + "".join(f"{head:>{width}}" for head, width in (*heads, ("CPU s", 7))))
    made = []
    with multiprocessing.get_context("fork").Pool(PROCESSES, _prepare, (log, ranker), maxtasksperchild=1) as pool:
        for row in pool.imap(_run_row, rows(log.name, options)):
            made.append(row)
            shares = "".join(f"{row[tier]:>{width}.1%}" for tier, width in zip(TIERS, (8, 7, 7, 7), strict=True))
            print(
                f"{row['policy']:<24}{row['ttl_h']:>4.0f}h{row['partitions']:>6}{shares}{row['exact_last_day']:>9.1%}"
                f"{row['fm_pairs_per_ranked']:>8.2f}{row['cpu_s']:>7.1f}",
                flush=True,
            )
    return {"ceiling_exact": round(limit, 4), "rows": made}


_shared: list[tuple[Loaded, Ranker]] = []
"""What a row's process inherits; it is not copied through a pipe."""


def _prepare(log: Loaded, ranker: Ranker) -> None:
    _shared[:] = [(log, ranker)]


def _run_row(row: Row) -> dict[str, Any]:
    log, ranker = _shared[0]
    return run(log, ranker, *row)


def main() -> None:
    """Print a table a log."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--log", choices=("generated", "taobao", "both"), default="both")
    parser.add_argument("--users", type=int, default=300)
    parser.add_argument("--items", type=int, default=700)
    parser.add_argument("--days", type=float, default=5.0)
    parser.add_argument("--taobao-days", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="the target's row and the baseline, of a small log")
    parser.add_argument(
        "--full", action="store_true", help="also 16 partitions, every policy at 4 h, all days of Taobao (half an hour)"
    )
    parser.add_argument("--profile", action="store_true", help="where the first row's time goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.users, options.days = min(options.users, 150), min(options.days, 3.0)
    figures: dict[str, Any] = {"bench": "coverage"}
    with tempfile.TemporaryDirectory(prefix="solaris-bench-") as place:
        if options.log != "taobao":
            shape = GenerateConfig(users=options.users, items=options.items, days=options.days, seed=options.seed)
            generate(shape, Path(place) / "generated")
            log = load(Path(place) / "generated", "generated", options.days)
            if options.profile:
                _profile(log)
                return
            figures["generated"] = table(log, options)
        if options.log != "generated" and not options.quick:
            if TAOBAO.is_file():
                import_log(TAOBAO, Path(place) / "taobao")
                days = 9.0 if options.full else options.taobao_days
                figures["taobao"] = table(load(Path(place) / "taobao", "taobao", days), options)
            else:
                print(
                    f"\ntaobao: {TAOBAO.name} is not in ../shared/data/taobao, so there is no table of it",
                    file=sys.stderr,
                )
    best = figures["generated" if "generated" in figures else "taobao"]["rows"]
    figures["exact"] = best[0]["exact"]
    figures["with_fallbacks"] = best[0]["with_fallbacks"]
    figures["fm_pairs_per_ranked"] = best[0]["fm_pairs_per_ranked"]
    figures["ratio"] = {"reactive": round(best[0]["exact"] / max(1e-9, best[1]["exact"]), 3)}
    print(json.dumps(figures))


def _profile(log: Loaded) -> None:
    ranker = first_ranker(log)
    profiler = cProfile.Profile()
    profiler.enable()
    row = run(log, ranker, SPECULATIVE, 24 * HOUR_MS, 1)
    profiler.disable()
    print(row)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(50)


if __name__ == "__main__":
    main()

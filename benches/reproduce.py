"""How much of the FM's gain reaches the ranker, on a generated log whose true probabilities are known.

    python -m benches.reproduce [--users N] [--days D] [--seeds 11,12,13] [--pairs-per-ranked 2.5]

Per seed: a log; the pipeline's own replay, with the FM trained on the first half of the requests and refreshed daily, writes the
vectors, so that coverage, ages and misses are those of serving; then rankers that differ only in what they are given. All start as
the ranker of the first half, train on the days after it, and stop on the newest tenth of those. The last three days are the test:
each model sees them once; the weight of distillation is chosen by the log loss on the tenth that stopped the training.

Transfer ratio (TR): (BCE base - BCE variant) / (BCE base - BCE of the FM). The FM speaks for its own day with what it learned until
that day's start, from the history as of the request.

    distillation    the base with soft labels of the FM       solaris       the hierarchy, exact hits with a head of their own
    exact           exact vectors alone                       solaris_kd    solaris with soft labels
    hierarchy       exact, user mean, neighbour; one head     full_coverage every pair has a vector, as old as real hits are
    shuffled        solaris, each vector another pair's       tier_only     solaris, vectors zero: masks and ages alone

The last line is JSON: per figure `mean`, `low`, `high`; of one seed from a bootstrap over users, of several from Student's t.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from models.evaluate import F64, PROBABILITY_MIN, evaluate
from models.features import F32, I64, Features, Vectors
from models.train import RankerTraining, train_ranker
from schemas.errors import UsageError
from schemas.log import Log
from solaris.generate import generate
from solaris.train import Replayed, TrainConfig, Trainer
from solaris.world import DAY_MS, HOUR_MS, GenerateConfig
from streams.serve import ServeConfig
from streams.verify import VerifyConfig

TEST_DAYS = 3.0
REQUESTS_MIN = 500
TEACHER_WEIGHTS = (0.25, 0.5, 0.75)
BOOTSTRAPS = 400
STUDENT_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
CONTROLS = ("shuffled", "tier_only")


@dataclass(frozen=True)
class Part:
    """The requests of a span: what a ranker was given, the first task's labels, and what the FM said of each pair."""

    features: Features
    vectors: Vectors
    aged: Vectors
    labels: F32
    teacher: F64


def losses(chances: F64, labels: F32) -> F64:
    """float64 [n]: each pair's log loss."""
    p = np.clip(chances, PROBABILITY_MIN, 1 - PROBABILITY_MIN)
    return np.asarray(-np.where(labels > 0, np.log(p), np.log1p(-p)), np.float64)


def aged(made: Replayed, seed: int) -> Vectors:
    """The replay's vectors with an exact one for every pair: of an FM and a history as much older as real hits were."""
    hits = made.vectors.exact_age_ms
    draw: I64 = np.random.default_rng(seed).choice(hits[hits >= 0], len(made.rows.ts))
    big, compressor = made.fm.outputs(made.rows, draw)[0], made.fm.compressor
    usable = compressor.usable(big)
    exact = np.zeros_like(made.vectors.exact)
    exact[usable] = compressor.decode(*compressor.encode(big[usable]))
    return replace(made.vectors, exact=exact, exact_age_ms=np.where(usable, draw[made.rows.request], -1))


def parts(made: Replayed, seed: int) -> tuple[Part, Part]:
    """Training span and test span. Raises `UsageError` where the log is too short for both."""
    teacher, full = made.fm.outputs(made.rows)[1][:, 0], aged(made, seed)
    last = len(made.rows.ts)
    edge = int(np.searchsorted(made.rows.ts, made.rows.ts[-1] - TEST_DAYS * DAY_MS))
    if edge - made.warm < REQUESTS_MIN:
        raise UsageError(
            f"{edge - made.warm} requests lie between the first vector and the test; give more days (--days) or users"
        )
    whole = replace(made, vectors=full)

    def part(low: int, high: int) -> Part:
        features, vectors, labels = made.requests(low, high)
        pairs = slice(int(made.rows.starts[low]), int(made.rows.starts[high]))
        return Part(features, vectors, whole.requests(low, high)[1], labels[:, 0], teacher[pairs])

    return part(made.warm, edge), part(edge, last)


def exact_only(vectors: Vectors) -> Vectors:
    """Without the user's and the neighbours' means."""
    missing = np.full(len(vectors.user), -1, np.int64)
    return replace(vectors, user_age_ms=missing, neighbor_age_ms=missing)


def shuffled(vectors: Vectors, seed: int) -> Vectors:
    """The same masks and ages; every vector is another's of its slot."""
    source = np.random.default_rng(seed)

    def moved(values: F32, ages: I64) -> F32:
        out, there = values.copy(), np.flatnonzero(ages >= 0)
        out[there] = values[source.permutation(there)]
        return out

    return replace(
        vectors,
        exact=moved(vectors.exact, vectors.exact_age_ms),
        user=moved(vectors.user, vectors.user_age_ms),
        neighbor=moved(vectors.neighbor, vectors.neighbor_age_ms),
    )


def emptied(vectors: Vectors) -> Vectors:
    """Masks and ages alone."""
    names = ("exact", "user", "neighbor")
    return replace(vectors, **{name: np.zeros_like(getattr(vectors, name)) for name in names})


def variants(made: Replayed, train: Part, test: Part, seed: int) -> dict[str, F64]:
    """Log loss of each test pair by variant; "base" is the ranker without vectors."""
    start, out = made.base.widened(), {}

    def run(
        name: str, before: Vectors | None, after: Vectors | None, training: RankerTraining, taught: bool = False
    ) -> float:
        began = time.process_time()
        init = made.base if before is None else start
        ranker, report = train_ranker(
            train.features, before, train.labels, init.config, seed, training, init, train.teacher if taught else None
        )
        out[name] = losses(ranker.score_many(test.features, after), test.labels)
        ece = evaluate(ranker.score_many(test.features, after), test.labels).ece
        print(
            f"  {name:<18} stopped at {report.validation.bce:.5f}, test {out[name].mean():.5f}, ECE {ece:.4f}, "
            f"{time.process_time() - began:.0f} s CPU",
            flush=True,
        )
        return report.validation.bce

    plain = RankerTraining()
    run("base", None, None, plain)
    found = {w: run(f"distillation {w}", None, None, replace(plain, teacher_weight=w), True) for w in TEACHER_WEIGHTS}
    weight = min(found, key=found.__getitem__)
    out["distillation"] = out[f"distillation {weight}"]
    run("exact", exact_only(train.vectors), exact_only(test.vectors), replace(plain, heads=1))
    run("hierarchy", train.vectors, test.vectors, replace(plain, heads=1))
    run("solaris", train.vectors, test.vectors, plain)
    run("solaris_kd", train.vectors, test.vectors, replace(plain, teacher_weight=weight), True)
    run("full_coverage", train.aged, test.aged, plain)
    run("shuffled", shuffled(train.vectors, seed), shuffled(test.vectors, seed), plain)
    run("tier_only", emptied(train.vectors), emptied(test.vectors), plain)
    return {name: values for name, values in out.items() if not name.startswith("distillation ")}


def measured(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One seed: figures by path, and the test's losses and owners for the bootstrap."""
    began = time.process_time()

    def say(words: str) -> None:
        print(f"  {words} ({time.process_time() - began:.0f} s CPU)", flush=True)

    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="solaris-bench-") as place:
        shape = GenerateConfig(users=options.users, items=options.items, days=options.days, seed=seed)
        say(generate(shape, Path(place) / "log").note)
        log = Log(Path(place) / "log")
        config = TrainConfig(
            seed=seed,
            slice_ms=120_000,
            serve=ServeConfig(ttl_ms=24 * HOUR_MS, generation_records=2_000),
            verify=VerifyConfig(pairs_per_ranked=options.pairs_per_ranked),
        )
        made = Trainer(log, config, say).replay()
        say("replayed")
        train, test = parts(made, seed)
        oracle = np.concatenate([np.array(line.oracle) for line in log.requests()])[-len(test.labels) :]
        users = test.features.user_bucket[test.features.request]
    found = variants(made, train, test, seed)
    found |= {"fm": losses(test.teacher, test.labels), "oracle": losses(oracle, test.labels)}
    rate = np.full(len(test.labels), test.labels.mean())
    say(
        f"FM {found['fm'].mean():.5f}, oracle {found['oracle'].mean():.5f}, base rate {losses(rate, test.labels).mean():.5f}"
    )
    return {"losses": found, "users": users, "coverage": coverage(test), "pairs": spent(made)}


def coverage(test: Part) -> dict[str, float]:
    """Share of the test's pairs by the best tier that they had."""
    request, vectors = test.features.request, test.vectors
    exact = vectors.exact_age_ms >= 0
    user = ~exact & (vectors.user_age_ms >= 0)[request]
    neighbor = ~exact & ~user & (vectors.neighbor_age_ms >= 0)[request]
    return {"exact": float(exact.mean()), "user": float(user.mean()), "neighbor": float(neighbor.mean())}


def spent(made: Replayed) -> float:
    """FM pairs a ranked pair since the first vector."""
    return made.counts.fm_pairs / max(1, made.counts.ranked_pairs)


def ratios(mean: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Transfer ratios and controls from mean log losses."""
    gap = mean["base"] - mean["fm"]
    tr = {n: (mean["base"] - loss) / gap for n, loss in mean.items() if n not in ("base", "fm", "oracle")}
    return {
        "transfer_ratio": {name: value for name, value in tr.items() if name not in CONTROLS},
        "controls": {name: tr[name] for name in CONTROLS},
        "bce": {name: mean[name] for name in ("base", "fm", "oracle")},
    }


def bootstrapped(run: dict[str, Any]) -> list[dict[str, dict[str, float]]]:
    """`ratios` of resampled users."""
    _, owner = np.unique(run["users"], return_inverse=True)
    source, count = np.random.default_rng(0), int(owner.max()) + 1
    sums = {name: np.bincount(owner, values, count) for name, values in run["losses"].items()}
    pairs = np.bincount(owner, minlength=count)
    made = []
    for _ in range(BOOTSTRAPS):
        weight = source.multinomial(count, np.full(count, 1 / count))
        made.append(ratios({name: float(values @ weight / (pairs @ weight)) for name, values in sums.items()}))
    return made


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the last line."""
    means = [ratios({name: float(values.mean()) for name, values in run["losses"].items()}) for run in runs]
    spread = bootstrapped(runs[0]) if len(runs) == 1 else means
    out: dict[str, Any] = {
        group: {name: interval([m[group][name] for m in means], [b[group][name] for b in spread]) for name in names}
        for group, names in means[0].items()
    }
    tiers = runs[0]["coverage"]
    out["coverage"] = {tier: interval([run["coverage"][tier] for run in runs]) for tier in tiers}
    out["fm_pairs_per_impression"] = interval([run["pairs"] for run in runs])
    return out


def interval(values: list[float], spread: list[float] | None = None) -> dict[str, float]:
    """Mean with a 95 % interval: quantiles of a bootstrap for one value, Student's t for several; none where there is neither."""
    mean = float(np.mean(values))
    if len(values) > 1:
        half = STUDENT_95.get(len(values), 2.0) * float(np.std(values, ddof=1)) / len(values) ** 0.5
        low, high = mean - half, mean + half
    else:
        low, high = (float(x) for x in np.quantile(spread or values, (0.025, 0.975)))
    return {"mean": round(mean, 5), "low": round(low, 5), "high": round(high, 5)}


def main() -> None:
    """Each seed, then the table and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--users", type=int, default=600)
    parser.add_argument("--items", type=int, default=700)
    parser.add_argument("--days", type=float, default=21.0)
    parser.add_argument("--seeds", default="11", help="one or more, such as 11,12,13")
    parser.add_argument("--pairs-per-ranked", type=float, default=2.5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    figures = summary([measured(int(seed), options) for seed in options.seeds.split(",")])
    for group in ("transfer_ratio", "controls", "coverage"):
        for name, value in figures[group].items():
            print(f"{group:<16}{name:<16}{value['mean']:>8.1%}  ({value['low']:.1%} to {value['high']:.1%})")
    if figures["bce"]["fm"]["mean"] >= figures["bce"]["base"]["mean"]:
        print("the FM has no gain on this log: the ratios above mean nothing", file=sys.stderr)
    seeds = options.seeds.count(",") + 1
    print(json.dumps({"bench": "reproduce", "seeds": seeds, "cpu_s": round(time.process_time() - began), **figures}))


if __name__ == "__main__":
    main()

"""What an answer costs: requests of 100 candidates a second and core, from JSON bytes to JSON bytes, and where the time goes.

    python -m benches.serve [--batch 64] [--candidates 100] [--seconds 3] [--rocks] [--quick | --no-kafka]

Peer, measured in the same run: the ranker alone on features that lie ready. The ratio says what everything around it costs.
Core: no Kafka, one thread, real ranker with random weights, state as after a day of traffic. Throughput counts processor
time, so that a busy machine does not show; so does `single_cpu_us`, beside latency by the clock on the wall. `kafka`: the same
requests through topics and a worker process with its state on disk, counted in its processor time, all threads and the idle time's
polling included. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from models.ranker import Ranker, RankerConfig
from schemas.events import EventBatch, Item
from schemas.inference import Embeddings
from schemas.ranking import RankingRequest, decode_request, encode_request
from streams.items import ItemIndex
from streams.score import Scored
from streams.serve import Serve, ServeConfig
from streams.state.memory import MemoryStore
from streams.state.store import Store

NOW, HOUR = 1_700_000_000_000, 3_600_000
USERS, ITEMS, SPACE, D = 2_000, 20_000, 7, 16


def filled(store: Store, seed: int = 1) -> Serve:
    """A partition after a day: 2,000 users with full histories, 60 pairs each in the cache, one in ten without any vector."""
    rng = np.random.default_rng(seed)
    items = ItemIndex(content_dims=16)
    content = rng.standard_normal((ITEMS, 16)).round(3)
    items.update([(f"item-{i}", Item(f"item-{i}", f"c{i % 200}", content[i].tolist())) for i in range(ITEMS)])
    ranker = Ranker.untrained(RankerConfig(d=D, content_dims=16), seed=0)
    serve = Serve(0, "bench", ranker, None, SPACE, D, ServeConfig(), store, items)
    for part in range(10):
        n = 40_000
        ts = np.sort(NOW - 20 * HOUR + part * 2 * HOUR + rng.integers(0, 2 * HOUR, n))
        users = [f"user-{u}" for u in rng.integers(0, USERS, n)]
        names = [f"item-{i}" for i in rng.zipf(1.3, n) % ITEMS]
        offsets = np.arange(part * n, (part + 1) * n)
        types = rng.choice([1, 1, 2, 3], n).astype(np.uint8)
        serve.events(EventBatch(0, offsets, ts, ts, users, names, types), (part + 1) * n)
    for user in range(USERS - USERS // 10):
        pairs = [f"item-{i}" for i in np.unique(rng.zipf(1.3, 60) % ITEMS)]
        codes, scales = rng.integers(1, 100, (len(pairs), D)).astype(np.int8), np.full(len(pairs), 0.02, np.float32)
        as_of = NOW - int(rng.integers(HOUR // 6, 6 * HOUR))
        serve.embeddings([Embeddings(f"user-{user}", SPACE, as_of, user, pairs, scales, codes)], user + 1)
    serve.install(serve.generation())
    return serve


def requests(count: int, candidates: int, seed: int = 2) -> list[tuple[bytes, bytes]]:
    """Key and JSON of `count` requests."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        user = f"user-{rng.integers(0, USERS)}"
        popular = list(dict.fromkeys((rng.zipf(1.3, 20 * candidates) % ITEMS).tolist()))[:candidates]
        names: list[str | int] = [f"item-{i}" for i in popular]
        made.append((user.encode(), encode_request(RankingRequest(f"r{seed}-{number}", user, names, NOW))))
    return made


def answer(serve: Serve, batch: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """Bytes in, bytes out: what the shell does between its consumer and its producer."""
    return serve.answer([decode_request(key, value, NOW, offset) for offset, (key, value) in enumerate(batch)])


def timed(serve: Serve, batch: int, candidates: int, seconds: float, seed: int) -> tuple[list[float], list[float]]:
    """Processor and wall seconds a request of each batch; every request is new."""
    busy: list[float] = []
    wall: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        seed += 1
        made = requests(batch, candidates, seed)
        start, started = time.perf_counter(), time.process_time()
        answer(serve, made)
        busy.append((time.process_time() - started) / batch)
        wall.append((time.perf_counter() - start) / batch)
    return busy, wall


def ranker_alone(serve: Serve, batch: int, candidates: int) -> float:
    """Seconds a request of the ranker on ready-made features."""
    seen: list[Scored] = []
    serve.observer = lambda _requests, scored: seen.append(scored)
    answer(serve, requests(batch, candidates, 3))
    serve.observer = None
    ranker = serve.ranker
    took = []
    for _ in range(50):
        start = time.process_time()
        ranker.score(seen[0].features, seen[0].found.vectors)
        took.append((time.process_time() - start) / batch)
    return statistics.median(took)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rocks", action="store_true", help="RocksDB instead of the memory store")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-kafka", action="store_true", help="the core alone")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, for checking")
    options = parser.parse_args()
    options.seconds /= 10 if options.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        serve = filled(_rocks(Path(folder)) if options.rocks else MemoryStore())
        if options.profile:
            _profile(serve, options.batch, options.candidates)
        peer = ranker_alone(serve, options.batch, options.candidates)
        busy, _ = timed(serve, options.batch, options.candidates, options.seconds, 1_000)
        single, wall = timed(serve, 1, options.candidates, options.seconds, 1_000_000)
        each = statistics.median(busy)
        p50, p99 = (1e6 * float(np.quantile(wall, share)) for share in (0.5, 0.99))
        print(f"batches of {options.batch}: {1e6 * each:.0f} us a request, {1 / each:.0f} requests/s a core")
        print(f"one at a time: p50 {p50:.0f} us, p99 {p99:.0f} us")
        print(f"ranker alone: {1e6 * peer:.0f} us a request; all in / ranker alone = {each / peer:.2f}")
        figures: dict[str, object] = {
            "requests_per_s": round(1 / each),
            "latency_us": {"p50": round(p50), "p99": round(p99)},
        }
        figures["single_cpu_us"] = round(1e6 * statistics.median(single))
        ratio = {"ranker_alone": round(each / peer, 2)}
        if not options.no_kafka:
            figures["kafka"] = live = through_kafka(2_000 if options.quick else 10_000, options.candidates)
            ratio["core"] = round(live["cpu_us"] / (1e6 * each), 2)
            print(
                f"through Kafka: {live['cpu_us']} us CPU of the worker a request, {live['requests_per_s_core']} requests/s a core; "
                f"{ratio['core']} times the core alone"
            )
        print(json.dumps({**figures, "ratio": ratio}))


def through_kafka(count: int, candidates: int, partitions: int = 4) -> dict[str, int]:
    """A serve worker with a day's state answers `count` requests that lie ready; its processor time a request."""
    from benches.live import cpu_s, stand
    from schemas.topics import RANKING_REQUESTS

    with stand(partitions, {"SOLARIS_SERVE__GENERATION_RECORDS": "200"}) as place:
        place.warm()
        with place.worker("serve") as workers:
            place.settle("serve")
            place.fill(RANKING_REQUESTS, requests(count // 10, candidates, 7))  # caches and lazy imports
            place.settle("serve")
            before, started = cpu_s(workers.pid("serve")), time.perf_counter()
            place.fill(RANKING_REQUESTS, requests(count, candidates, 8))
            place.settle("serve")
            spent, wall = cpu_s(workers.pid("serve")) - before, time.perf_counter() - started
            workers.check()
    return {
        "cpu_us": round(1e6 * spent / count),
        "requests_per_s_core": round(count / spent),
        "requests_per_s_wall": round(count / wall),
    }


def _rocks(folder: Path) -> Store:
    from streams.state.manifest import StateManifest
    from streams.state.rocks import open_store

    return open_store(folder / "state", StateManifest(0, SPACE, {}))


def _profile(serve: Serve, batch: int, candidates: int) -> None:
    import cProfile
    import pstats

    work = [requests(batch, candidates, 50 + number) for number in range(20)]
    profiler = cProfile.Profile()
    profiler.enable()
    for made in work:
        answer(serve, made)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()

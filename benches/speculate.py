"""What speculation costs: events a second and core, from JSON bytes in to the bytes of FM requests out, and where the time goes.

    python -m benches.speculate [--minutes 120] [--pairs-per-ranked 2] [--memory] [--profile] [--quick | --no-kafka]

Peer, measured in the same run: the same events decoded and folded into the same tables, without predicting anything. The ratio says
what prediction and verification cost on top. Core only: no Kafka, one thread, a ranker with random weights, state on disk; the
results and the embeddings' heads of the same time are part of the path and are counted into the time per event. Times are this
thread's CPU time, so that a busy machine does not show. `kafka`: the same traffic through topics and a worker process, in its
processor time, all threads and the idle time's polling included; beside it what a stock Faust agent that only counts takes is in
`benches.transport`.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
import torch

from models.ranker import Ranker, RankerConfig
from schemas.events import Event, Item, decode_events, encode_event
from schemas.inference import Embeddings, FmRequest, decode_embeddings, encode_embeddings, encode_fm_request
from schemas.ranking import Basis, RankedItem, RankedResult, decode_result, encode_result
from schemas.topics import EVENTS
from streams.counters import ItemCounters
from streams.history import History
from streams.items import ItemIndex
from streams.speculate import Speculate, SpeculateConfig
from streams.state.manifest import StateManifest
from streams.state.memory import MemoryStore
from streams.state.rocks import open_store
from streams.state.store import Store, Transaction
from streams.verify import VerifyConfig

START, MINUTE = 1_700_000_000_000, 60_000
USERS, ITEMS, CATEGORIES, SPACE, CANDIDATES = 3_000, 20_000, 200, 7, 25


@dataclass(frozen=True)
class Piece:
    """One poll of the topics: events as the consumer hands them over, and results as bytes."""

    offsets: list[int]
    keys: list[bytes]
    values: list[bytes]
    append_ms: list[int]
    results: list[bytes]
    ranked: list[tuple[str, int, list[str]]]


def traffic(minutes: int, batch_minutes: int, seed: int = 1) -> Iterator[Piece]:
    """Visits of 25 ranked pairs, ten impressions and three other events; 30 visits a minute, a third of the pairs seen before."""
    rng = np.random.default_rng(seed)
    weight = 1.0 / np.arange(1, ITEMS + 1)
    weight /= weight.sum()
    seen: dict[int, list[int]] = {}
    offset = 0
    for first in range(0, minutes, batch_minutes):
        rows: list[tuple[int, str, str, str]] = []
        ranked = []
        users = (rng.zipf(1.2, 30 * batch_minutes) % USERS).tolist()
        pool = rng.choice(ITEMS, (len(users), CANDIDATES), p=weight)
        times = START + first * MINUTE + np.sort(rng.integers(0, batch_minutes * MINUTE, len(users)))
        for user, drawn, ts in zip(users, pool.tolist(), times.tolist(), strict=True):
            mine = seen.setdefault(user, [])
            names = [f"item-{item}" for item in dict.fromkeys([*rng.permutation(mine)[:8].tolist(), *drawn])][
                :CANDIDATES
            ]
            ranked.append((f"user-{user}", ts, names))
            rows += [(ts + 1, f"user-{user}", name, "impression") for name in names[:10]]
            rows += [
                (ts + 2, f"user-{user}", name, kind)
                for name, kind in zip(names[:3], ("view", "click", "cart"), strict=True)
            ]
            mine.extend(drawn[:4])
            del mine[:-30]
        offsets = list(range(offset, offset + len(rows)))
        offset += len(rows)
        values = [encode_event(Event(user, item, kind, ts)) for ts, user, item, kind in rows]
        yield Piece(offsets, [row[1].encode() for row in rows], values, [row[0] for row in rows], [], ranked)


class World:
    """The FM and serve, as far as speculation sees them: every request is answered by the next poll."""

    def __init__(self, ttl_ms: int, space: int = SPACE) -> None:
        self.ttl_ms, self.space = ttl_ms, space
        self.cache: dict[tuple[str, str], int] = {}

    def results(self, piece: Piece) -> list[bytes]:
        """What serve would have written."""
        out = []
        for user, ts, names in piece.ranked:
            items = [
                RankedItem(name, 0.1, "exact" if ts - self.cache.get((user, name), 0) < self.ttl_ms else "user")
                for name in names
            ]
            out.append(encode_result(RankedResult(f"{user}-{ts}", user, ts, items, [], Basis(0, 0, 0, 0, 0, "b", "c"))))
        return out

    def embeddings(self, requests: list[FmRequest]) -> list[bytes]:
        """What the FM would have written."""
        out = []
        for request in requests:
            n = len(request.items)
            self.cache.update({(request.user, name): request.as_of for name in request.items})
            ones = np.ones(n, np.float32), np.ones((n, 16), np.int8)
            out.append(encode_embeddings(Embeddings(request.user, self.space, request.as_of, 0, request.items, *ones)))
        return out


def run(speculate: Speculate, pieces: list[Piece], world: World, spent: dict[str, float]) -> tuple[int, int]:
    """Play pieces; adds seconds by stage to `spent`; returns events and FM pairs."""
    events = pairs = 0
    for piece in pieces:
        results = world.results(piece)
        clock = [time.thread_time()]
        batch, _ = decode_events(0, piece.offsets, piece.keys, piece.values, piece.append_ms)
        clock.append(time.thread_time())
        made = speculate.events(batch, piece.offsets[-1] + 1)
        clock.append(time.thread_time())
        made += speculate.results([decode_result(value) for value in results], 0)
        clock.append(time.thread_time())
        for request in made:
            encode_fm_request(request)
        clock.append(time.thread_time())
        answers = world.embeddings(made)
        away = time.thread_time() - clock[-1]
        speculate.heads([decode_embeddings(value) for value in answers], 0)
        clock.append(time.thread_time() - away)
        for stage, begin, end in zip(
            ("decode", "events", "results", "encode", "heads"), clock[:-1], clock[1:], strict=True
        ):
            spent[stage] = spent.get(stage, 0.0) + end - begin
        events += len(batch)
        pairs += sum(len(request.items) for request in made)
    return events, pairs


def fold_only(store: Store, index: ItemIndex, pieces: list[Piece]) -> float:
    """The peer: seconds for decoding and folding the same events."""
    history, shown, counters = History("history", 100, False), History("shown", 64, True), ItemCounters(index)
    begin = time.thread_time()
    for piece in pieces:
        batch, _ = decode_events(0, piece.offsets, piece.keys, piece.values, piece.append_ms)
        txn = Transaction(store)
        for fold in (history, shown, counters):
            fold.fold(batch, txn)
        txn.stamp(EVENTS.name, piece.offsets[-1] + 1)
        store.commit(txn)
    return time.thread_time() - begin


def index() -> ItemIndex:
    """The catalogue."""
    made = ItemIndex()
    made.update([(f"item-{item}", Item(f"item-{item}", f"c{item % CATEGORIES}")) for item in range(ITEMS)])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batch-minutes", type=int, default=2)
    parser.add_argument("--minutes", type=int, default=120)
    parser.add_argument("--pairs-per-ranked", type=float, default=2.0)
    parser.add_argument("--memory", action="store_true", help="state in memory")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-kafka", action="store_true", help="the core alone")
    parser.add_argument("--quick", action="store_true", help="a quarter of the work, for checking")
    args = parser.parse_args()
    if args.quick:
        args.minutes //= 4
    torch.set_num_threads(1)
    pieces = list(traffic(args.minutes, args.batch_minutes))
    warm, measured = pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]
    config = SpeculateConfig(verify=VerifyConfig(pairs_per_ranked=args.pairs_per_ranked))
    with tempfile.TemporaryDirectory(prefix="solaris-bench-") as folder:

        def store(name: str) -> Store:
            return MemoryStore() if args.memory else open_store(Path(folder) / name, StateManifest(0, SPACE, {}))

        speculate = Speculate(0, Ranker.untrained(RankerConfig(), 1), None, SPACE, config, store("full"), index(), 1)
        world, spent = World(config.ttl_ms), dict[str, float]()
        run(speculate, warm, world, {})
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        events, pairs = run(speculate, measured, world, spent)
        profile.disable()
        peer_store, peer_index = store("peer"), index()
        fold_only(peer_store, peer_index, warm)
        peer = fold_only(peer_store, peer_index, measured)
        speculate.store.close()
        peer_store.close()
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    total = sum(spent.values())
    stats = speculate.stats()
    candidates = stats["candidates"] / stats["predictions"]
    print(f"{events} events, {pairs / events:.2f} FM pairs an event, {candidates:.0f} candidates a prediction")
    print("µs an event: " + ", ".join(f"{stage} {1e6 * seconds / events:.1f}" for stage, seconds in spent.items()))
    print(f"{events / total:,.0f} events/s on the full path, {events / peer:,.0f} events/s decoded and folded only")
    result: dict[str, object] = {
        "bench": "speculate",
        "events_per_s": round(events / total),
        "ratio": {"fold_only": round(peer / total, 3)},
        "us_per_event": {stage: round(1e6 * seconds / events, 1) for stage, seconds in spent.items()},
        "fm_pairs_per_event": round(pairs / events, 3),
    }
    if not args.no_kafka:
        result["kafka"] = live = through_kafka(args.minutes, args.pairs_per_ranked)
        result["ratio"] = {
            "fold_only": round(peer / total, 3),
            "core": round(live["events_per_s_core"] * total / events, 3),
        }
        print(
            f"through Kafka: {live['events_per_s_core']:,.0f} events/s a core of the worker's CPU, "
            f"{live['fm_pairs_per_event']:.2f} FM pairs an event"
        )
    print(msgspec.json.encode(result).decode())


def through_kafka(minutes: int, pairs_per_ranked: float, partitions: int = 4) -> dict[str, float]:
    """A speculate worker takes the second half of the traffic, after the first has warmed it; 10 minutes of event time at once.

    The bench stands for serve and the FM: it writes the results beside the events, and answers FM requests between two pieces.
    """
    from confluent_kafka import Consumer, TopicPartition

    from agents.kafka import librdkafka_settings
    from benches.live import cpu_s, stand
    from schemas.inference import decode_fm_request
    from schemas.topics import EMBEDDINGS, FM_REQUESTS, RANKED_RESULTS

    settings = {"SOLARIS_VERIFY__PAIRS_PER_RANKED": str(pairs_per_ranked), "SOLARIS_TRANSPORT__COMMIT_MS": "50"}
    pieces = list(traffic(minutes, 10))
    with stand(partitions, settings) as place:
        place.catalogue(Item(f"item-{item}", f"c{item % CATEGORIES}") for item in range(ITEMS))
        world = World(SpeculateConfig().ttl_ms, place.bundle.space)
        consumer = Consumer(librdkafka_settings(place.kafka) | {"group.id": "bench-fm", "enable.auto.commit": False})
        consumer.assign([TopicPartition(place.kafka.topic(FM_REQUESTS), number, 0) for number in range(partitions)])
        with place.worker("speculate") as workers:
            spent = events = pairs = 0.0
            for number, piece in enumerate(pieces):
                results = zip((user.encode() for user, _, _ in piece.ranked), world.results(piece), strict=True)
                before = cpu_s(workers.pid("speculate"))
                place.fill(EVENTS, zip(piece.keys, piece.values, strict=True))
                place.fill(RANKED_RESULTS, results)
                place.settle("speculate")
                asked = []
                while messages := consumer.consume(1_000, 0.3):
                    asked += [decode_fm_request(message.value()) for message in messages if message.error() is None]
                keys = [request.user.encode() for request in asked]
                place.fill(EMBEDDINGS, zip(keys, world.embeddings(asked), strict=True))
                place.settle("speculate")
                if number >= len(pieces) // 2:
                    spent += cpu_s(workers.pid("speculate")) - before
                    events += len(piece.values)
                    pairs += sum(len(request.items) for request in asked)
            workers.check()
        consumer.close()
    return {
        "events_per_s_core": round(events / spent),
        "cpu_us_per_event": round(1e6 * spent / events, 1),
        "fm_pairs_per_event": round(pairs / events, 3),
    }


if __name__ == "__main__":
    main()

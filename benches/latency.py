"""From a request to its result through real Kafka: percentiles at a steady rate, beside an echo that ranks nothing.

    python -m benches.latency [--quick] [--realtime] [--seconds 30] [--candidates 100] [--partitions 4] [--settings KEY=VALUE ...]

Open loop: requests leave at fixed times whatever has come back, and a result's latency counts from the time at which its request
was to leave, so a stall shows in every request that it delayed (no coordinated omission). One serve worker with warm state
(histories, counters, vectors), one broker, one client; the first 10 s of each rate don't count (Kafka's JVM compiles).

Peer, in the same run: the same client and broker with a plain confluent-kafka consumer and producer that sends each request back,
which is what Kafka itself takes on this machine. The echo's answers are as long as its requests (1 KB), results are 8 KB.
`legs_ms` [p50, p99] says where the time goes: until the broker acknowledged the request, from there until the result lay in its
topic, from there until the client had it (the last two at the clock's millisecond). The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from agents.kafka import KafkaConfig, librdkafka_settings
from benches.live import Keyed, Stand, cpu_s, first_in_line, stand
from benches.serve import requests
from schemas.topics import RANKED_RESULTS, RANKING_REQUESTS
from solaris.workers import Workers

WARM_S, LATE_S_MAX = 10.0, 10.0
ECHO_REQUESTS, ECHO_RESULTS = "bench.requests", "bench.results"


def main() -> None:
    """Print a line a rate, for us and for the echo."""
    if sys.argv[1:2] == ["echo"]:
        return echo(sys.argv[2])
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="at the target's rate; others get a third")
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--rates", default="200,50,400", help="requests/s, the target's first")
    parser.add_argument("--settings", nargs="*", default=[], help="settings of the worker, as environment variables")
    parser.add_argument("--realtime", action="store_true", help="measure at real-time priority, ahead of other work")
    parser.add_argument("--quick", action="store_true", help="the target's rate alone, for 5 s")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rates = 5.0, options.rates.split(",")[0]
    rates = [int(rate) for rate in options.rates.split(",")]
    seconds = [options.seconds if place == 0 else options.seconds / 3 for place in range(len(rates))]
    settings = {"SOLARIS_SERVE__GENERATION_RECORDS": "200"} | dict(pair.split("=", 1) for pair in options.settings)
    ours: dict[str, Any] = {}
    peer: dict[str, Any] = {}
    with stand(options.partitions, settings) as place:
        place.warm()
        with place.worker("serve") as workers:
            for rate, span in zip(rates, seconds, strict=True):
                ours[str(rate)] = _told("serve", rate, through_serve(place, workers, rate, span, options))
        with echoing(place, options.partitions) as process:
            for rate, span in zip(rates, seconds, strict=True):
                peer[str(rate)] = _told("echo", rate, through_echo(place, process, rate, span, options))
    target = str(rates[0])
    ratio = round(ours[target]["p99_ms"] / peer[target]["p99_ms"], 2)
    print(json.dumps({"bench": "latency", "rate": ours, "echo": peer, "ratio": {"echo_p99": ratio}}))
    return None


def through_serve(
    place: Stand, workers: Workers, rate: int, seconds: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Percentiles of real requests, and what the worker spent on them."""
    made = requests(int(rate * (seconds + WARM_S)), options.candidates, seed=secrets.randbelow(1 << 30))
    client = OpenLoop(place.kafka, place.kafka.topic(RANKING_REQUESTS), place.kafka.topic(RANKED_RESULTS))
    pid = workers.pid("serve")
    before = cpu_s(pid)
    with first_in_line((place.broker_pid, pid, os.getpid()), options.realtime):
        found = client.run(made, rate)
    workers.check()
    return found | {"worker_cpu_ms_a_request": round(1000 * (cpu_s(pid) - before) / len(made), 2)}


def through_echo(place: Stand, process: int, rate: int, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """Percentiles of the same requests, sent back unread."""
    made = requests(int(rate * (seconds + WARM_S)), options.candidates, seed=secrets.randbelow(1 << 30))
    client = OpenLoop(place.kafka, ECHO_REQUESTS, ECHO_RESULTS)
    with first_in_line((place.broker_pid, process, os.getpid()), options.realtime):
        return client.run(made, rate)


class OpenLoop:
    """One client: a thread that sends on time, a thread that receives."""

    def __init__(self, kafka: KafkaConfig, requests: str, results: str) -> None:
        self._requests = requests
        self._consumer = Consumer(
            librdkafka_settings(kafka)
            | {
                "group.id": "bench-client",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 100,
                "socket.nagle.disable": True,
            }
        )
        partitions = self._consumer.list_topics(results, timeout=10.0).topics[results].partitions
        ends = {n: self._consumer.get_watermark_offsets(TopicPartition(results, n), 10.0)[1] for n in partitions}
        self._consumer.assign([TopicPartition(results, number, end) for number, end in ends.items()])
        settings = {"linger.ms": 0, "acks": "all", "socket.nagle.disable": True}
        self._producer = Producer(librdkafka_settings(kafka, producer=True) | settings)
        self._done = threading.Event()
        self._received: dict[bytes, tuple[float, int]] = {}
        self._acknowledged: dict[bytes, float] = {}

    def run(self, made: list[Keyed], rate: int) -> dict[str, Any]:
        """Send all at `rate` a second; percentiles in ms without the first seconds."""
        names = [_request_id(value) for _, value in made]
        reader = threading.Thread(target=self._receive, args=(len(made), len(made) / rate + LATE_S_MAX))
        poller = threading.Thread(target=self._poll)
        reader.start()
        poller.start()
        begin = time.time() + 0.5
        due = [begin + number / rate for number in range(len(made))]
        for (key, value), name, at in zip(made, names, due, strict=True):
            if (early := at - time.time()) > 0:
                time.sleep(early)
            self._producer.produce(self._requests, value, key, on_delivery=self._delivered(name))
        reader.join()
        self._producer.flush(10)
        poller.join()
        self._consumer.close()
        kept = slice(int(WARM_S * rate), None)
        return self._figures(names[kept], due[kept])

    def _figures(self, names: list[bytes], due: list[float]) -> dict[str, Any]:
        missing = [name for name in names if name not in self._received]
        assert not missing, f"{len(missing)} of {len(names)} requests have no result, {missing[0]!r} for one"
        arrived = np.array([self._received[name] for name in names])
        acknowledged = np.array([self._acknowledged[name] for name in names])
        took = 1000 * (arrived[:, 0] - np.array(due))
        legs = {
            "acknowledged": 1000 * (acknowledged - np.array(due)),
            "answered": arrived[:, 1] - 1000 * acknowledged,
            "received": 1000 * arrived[:, 0] - arrived[:, 1],
        }
        p50, p99, p999 = (round(float(value), 2) for value in np.percentile(took, (50, 99, 99.9)))
        return {
            "p50_ms": p50, "p99_ms": p99, "p99_9_ms": p999, "max_ms": round(float(took.max()), 2), "requests": len(took),
            "legs_ms": {name: [round(float(value), 2) for value in np.percentile(leg, (50, 99))] for name, leg in legs.items()},
        }  # fmt: skip

    def _delivered(self, name: bytes) -> Any:
        def note(error: KafkaError | None, _message: Message) -> None:
            assert error is None, error
            self._acknowledged[name] = time.time()

        return note

    def _poll(self) -> None:
        while not self._done.is_set() or len(self._producer):
            self._producer.poll(0.1)

    def _receive(self, wanted: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self._received) < wanted and time.monotonic() < deadline:
            message = self._consumer.poll(0.2)
            if message is not None and message.error() is None:
                now = time.time()
                self._received.setdefault(_request_id(message.value() or b""), (now, message.timestamp()[1]))
        self._done.set()


def _request_id(value: bytes) -> bytes:
    """The request's id, which is the first field of a request and of a result."""
    return value[15 : value.index(b'"', 15)]


def _told(who: str, rate: int, found: dict[str, Any]) -> dict[str, Any]:
    legs = ", ".join(f"{name} {p50}/{p99}" for name, (p50, p99) in found["legs_ms"].items())
    spent = found.get("worker_cpu_ms_a_request")
    share = f"; worker {spent} ms CPU a request" if spent is not None else ""
    print(
        f"{who:<6}{rate:>5}/s  p50 {found['p50_ms']:>7} ms  p99 {found['p99_ms']:>7} ms  p99.9 {found['p99_9_ms']:>7} ms"
        f"   legs p50/p99: {legs}{share}",
        flush=True,
    )
    return found


@contextlib.contextmanager
def echoing(place: Stand, partitions: int) -> Iterator[int]:
    """A process that sends every record of one topic to another; its id."""
    admin = AdminClient(librdkafka_settings(place.kafka))
    config = {"message.timestamp.type": "LogAppendTime"}
    new = [NewTopic(name, partitions, 1, config=config) for name in (ECHO_REQUESTS, ECHO_RESULTS)]
    for made in admin.create_topics(new).values():
        made.result(30)
    line = [sys.executable, "-m", "benches.latency", "echo", place.kafka.bootstrap]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the echo did not start"
        yield process.pid
    finally:
        process.terminate()
        process.wait(10)


def echo(bootstrap: str) -> None:
    """The peer: consume, produce, until it is terminated."""
    settings = librdkafka_settings(KafkaConfig(bootstrap=bootstrap))
    consumer = Consumer(settings | {"group.id": "bench-echo", "enable.auto.commit": False, "fetch.wait.max.ms": 20})
    partitions = consumer.list_topics(ECHO_REQUESTS, timeout=10.0).topics[ECHO_REQUESTS].partitions
    consumer.assign([TopicPartition(ECHO_REQUESTS, number, 0) for number in partitions])
    producer = Producer(settings | {"linger.ms": 0, "acks": "all", "socket.nagle.disable": True})
    print("ready", flush=True)
    while True:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            producer.produce(ECHO_RESULTS, message.value(), message.key(), message.partition())
        producer.poll(0)


if __name__ == "__main__":
    main()

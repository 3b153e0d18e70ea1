"""The batch transport beside stock Faust: the same events, the same broker, the same run, an agent that only counts.

    .venv/bin/python -m benches.transport [--events N] [--stock-events N] [--seconds S]

Also the time from request to response through a processor that echoes, at 200 requests/s, and beside it (`kafka_alone`) what
a record takes from one client to another without us: on a busy machine that is most of it. The last line is JSON:
events_per_s, ratio.stock_faust, rate.200, kafka_alone. Each worker is a process of its own; its clock runs from the first
record it saw to the last.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PARTITIONS = 4
RATE = 200


class Counter:
    """Counts records and notes when it saw the first and the last; tells and stops the process at `wanted`."""

    seen = 0
    first = 0.0

    @classmethod
    def count(cls, rows: int, wanted: int) -> None:
        """Count `rows` more."""
        if cls.seen == 0:
            cls.first = time.perf_counter()
        cls.seen += rows
        if cls.seen >= wanted:
            sys.stdout.write(json.dumps({"seen": cls.seen, "seconds": time.perf_counter() - cls.first}) + "\n")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGTERM)
            cls.seen = -(10**12)


def batch_worker(bootstrap: str, topic: str, wanted: int, echo: str) -> int:
    """The batch transport: counts to `wanted`, or echoes to the topic `echo`."""
    from agents.app import WorkerSettings, run_worker
    from agents.kafka import KafkaConfig
    from agents.transport.batch import RecordBatch
    from agents.transport.partition import InputTopic, PartitionStart

    class Processor:
        def __init__(self, start: PartitionStart) -> None:
            self.output = start.output

        def positions(self, start: PartitionStart) -> Mapping[str, int | None]:  # noqa: ARG002
            return {}

        def process(self, batch: RecordBatch) -> None:
            if echo:
                for key, value in zip(batch.keys, batch.values, strict=True):
                    self.output.send(echo, batch.partition, key, value)
            else:
                Counter.count(len(batch), wanted)

        def on_poison(self, batch: RecordBatch, index: int, error: Exception) -> None:  # noqa: ARG002
            raise error

        def mark(self, topic: str) -> str:  # noqa: ARG002
            return ""

        def close(self) -> None:
            pass

    settings = WorkerSettings(f"bench-{secrets.token_hex(4)}", (InputTopic(topic),), KafkaConfig(bootstrap=bootstrap))
    return run_worker(settings, Processor)


def stock_worker(bootstrap: str, topic: str, wanted: int) -> int:
    """Stock Faust as it comes, its agent counting raw values."""
    import faust

    app = faust.App(
        f"stock-{secrets.token_hex(4)}",
        broker=f"kafka://{bootstrap}",
        store="memory://",
        topic_disable_leader=True,
        web_enabled=False,
        datadir=tempfile.mkdtemp(),
        consumer_auto_offset_reset="earliest",
        worker_redirect_stdouts=False,
    )
    events = app.topic(topic, value_serializer="raw", key_serializer="raw")

    @app.agent(events)
    async def count(stream: faust.StreamT[bytes]) -> None:
        async for _ in stream:
            Counter.count(1, wanted)

    faust.Worker(app, loglevel="WARNING", quiet=True).execute_from_commandline()


def fill(bootstrap: str, topic: str, events: int) -> None:
    """Write `events` JSON events, spread over the partitions."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for index in range(events):
        user = f"user-{index * 7919 % 100_003}"
        value = json.dumps(
            {"user_id": user, "item_id": f"item-{index % 9973}", "event_type": "click", "ts": 1_700_000_000_000}
        )
        producer.produce(topic, value.encode(), user.encode(), index % PARTITIONS)
        if index % 10_000 == 0:
            producer.poll(0)
    producer.flush(120)


def worker(kind: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a worker process of this module."""
    return subprocess.Popen(
        [sys.executable, "-m", "benches.transport", kind, *arguments], stdout=subprocess.PIPE, text=True
    )


def events_per_s(kind: str, bootstrap: str, topic: str, events: int) -> float:
    """Run one counting worker over `events` records."""
    process = worker(kind, bootstrap, topic, str(events))
    assert process.stdout is not None
    told = json.loads(next(line[line.index("{") :] for line in process.stdout if '{"seen"' in line))
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    return float(told["seen"]) / float(told["seconds"])


def latencies_ms(bootstrap: str, requests: str, responses: str, seconds: float) -> dict[str, Any]:
    """Send `RATE` requests/s for `seconds`, time each until its response is here; percentiles in ms, without the first second."""
    from confluent_kafka import Consumer, Producer, TopicPartition

    client: dict[str, Any] = {"bootstrap.servers": bootstrap, "logger": logging.getLogger("bench")}
    consumer = Consumer({**client, "group.id": "bench-client", "fetch.wait.max.ms": 100})
    consumer.assign([TopicPartition(responses, partition, 0) for partition in range(PARTITIONS)])
    producer = Producer({**client, "linger.ms": 0, "acks": "all", "socket.nagle.disable": True})
    took: list[float] = []
    total, deadline = int(RATE * seconds), time.perf_counter() + seconds + 30

    def receive() -> None:
        while len(took) < total and time.perf_counter() < deadline:
            message = consumer.poll(0.5)
            if message is not None and message.error() is None:
                took.append((time.perf_counter() - float(message.value() or b"0")) * 1000)

    reader = threading.Thread(target=receive)
    reader.start()
    begin = time.perf_counter()
    for index in range(total):
        time.sleep(max(0.0, begin + index / RATE - time.perf_counter()))
        producer.produce(requests, repr(time.perf_counter()).encode(), b"k", index % PARTITIONS)
        producer.poll(0)
    producer.flush(10)
    reader.join()
    consumer.close()
    p50, p99, p999 = (round(float(value), 2) for value in np.percentile(took[RATE:], (50, 99, 99.9)))
    return {"p50_ms": p50, "p99_ms": p99, "p99_9_ms": p999, "requests": len(took)}


def measure(events: int, stock_events: int, seconds: float) -> dict[str, Any]:
    """All figures, on one broker."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    from solaris.broker import Broker

    with tempfile.TemporaryDirectory(prefix="solaris-bench-") as directory, Broker.start(Path(directory)) as broker:
        bootstrap = broker.bootstrap
        names = ("events", "few-events", "requests", "responses", "alone")
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for made in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in names]).values():
            made.result(30)
        fill(bootstrap, "events", events)
        fill(bootstrap, "few-events", stock_events)
        ours = events_per_s("batch", bootstrap, "events", events)
        stock = events_per_s("stock", bootstrap, "few-events", stock_events)
        echo = worker("batch", bootstrap, "requests", "0", "responses")
        alone = latencies_ms(
            bootstrap, "alone", "alone", seconds
        )  # meanwhile the worker starts and the broker warms up
        echoed = latencies_ms(bootstrap, "requests", "responses", seconds)
        echo.send_signal(signal.SIGTERM)
        exit_code = echo.wait(60)
    return {
        "events_per_s": round(ours),
        "stock_events_per_s": round(stock),
        "ratio": {"stock_faust": round(ours / stock, 1)},
        "rate": {str(RATE): echoed},
        "kafka_alone": alone,
        "exit_code": exit_code,
    }


def main(arguments: list[str]) -> int:
    """Measure, or be one of the workers."""
    if arguments[:1] == ["batch"]:
        return batch_worker(arguments[1], arguments[2], int(arguments[3]), arguments[4] if len(arguments) > 4 else "")
    if arguments[:1] == ["stock"]:
        return stock_worker(arguments[1], arguments[2], int(arguments[3]))
    logging.getLogger("bench").addHandler(logging.NullHandler())
    parser = argparse.ArgumentParser(description="The batch transport beside stock Faust.")
    parser.add_argument("--events", type=int, default=1_000_000, help="events through the batch transport")
    parser.add_argument("--stock-events", type=int, default=80_000, help="events through stock Faust")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long requests are sent")
    chosen = parser.parse_args(arguments)
    sys.stdout.write(json.dumps(measure(chosen.events, chosen.stock_events, chosen.seconds)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

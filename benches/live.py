"""What the benches of running workers share: a broker, topics, a bundle with random weights, workers, their processor time.

In: records to fill the topics with. Out: a `Stand` whose workers are ready. Everything lies in a temporary folder and is stopped
and removed at the end. Random weights cost as much as trained ones; no figure of quality comes from here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from confluent_kafka import Producer

from agents.groups import group_id, group_topics
from agents.kafka import KafkaConfig, ensure_topics, librdkafka_settings
from agents.lag import Lag
from benches.serve import HOUR, ITEMS, NOW, USERS
from models.bundle import Bundle, untrained_bundle
from schemas.events import Event, Item, encode_event, encode_item
from schemas.inference import Embeddings, encode_embeddings
from schemas.topics import EMBEDDINGS, EVENTS, TopicSpec
from schemas.topics import ITEMS as ITEMS_TOPIC
from solaris.broker import Broker
from solaris.workers import Workers

D, CONTENT = 16, 16
Keyed = tuple[bytes, bytes]

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Stand:
    """A broker with topics, and whatever workers were started on it."""

    kafka: KafkaConfig
    folder: Path
    bundle: Bundle
    settings: dict[str, str]
    broker_pid: int

    def fill(self, topic: TopicSpec, rows: Iterable[Keyed]) -> None:
        """Write records (key, value) and wait until the broker has them."""
        producer = Producer(
            librdkafka_settings(self.kafka, producer=True)
            | {"linger.ms": 20, "queue.buffering.max.messages": 1_000_000}
        )
        for number, (key, value) in enumerate(rows):
            producer.produce(self.kafka.topic(topic), value, key)
            if number % 10_000 == 0:
                producer.poll(0)
        left = producer.flush(120)
        assert not left, f"{left} records were not acknowledged within 120 s"

    def catalogue(self, items: Iterable[Item]) -> None:
        """Write the catalogue; workers read it when they start."""
        self.fill(ITEMS_TOPIC, ((str(item.item_id).encode(), encode_item(item)) for item in items))

    def warm(self, events: int = 100_000, seed: int = 1) -> None:
        """A day of the world of `benches.serve`: its catalogue, events, and 60 vectors of nine users in ten."""
        rng = np.random.default_rng(seed)
        content = rng.standard_normal((ITEMS, CONTENT)).round(3).tolist()
        self.catalogue(Item(f"item-{i}", f"c{i % 200}", content[i]) for i in range(ITEMS))
        ts = np.sort(NOW - 20 * HOUR + rng.integers(0, 20 * HOUR, events)).tolist()
        users, items = rng.integers(0, USERS, events).tolist(), (rng.zipf(1.3, events) % ITEMS).tolist()
        kinds = rng.choice(["impression", "impression", "view", "click"], events).tolist()
        rows = (
            Event(f"user-{u}", f"item-{i}", kind, at) for u, i, kind, at in zip(users, items, kinds, ts, strict=True)
        )
        self.fill(EVENTS, ((str(event.user_id).encode(), encode_event(event)) for event in rows))
        self.fill(EMBEDDINGS, (self._vectors(user, rng) for user in range(USERS - USERS // 10)))

    def _vectors(self, user: int, rng: np.random.Generator) -> Keyed:
        pairs = [f"item-{i}" for i in np.unique(rng.zipf(1.3, 60) % ITEMS)]
        codes, scales = rng.integers(1, 100, (len(pairs), D)).astype(np.int8), np.full(len(pairs), 0.02, np.float32)
        as_of = NOW - int(rng.integers(HOUR // 6, 6 * HOUR))
        made = Embeddings(f"user-{user}", self.bundle.space, as_of, user, pairs, scales, codes)
        return made.user.encode(), encode_embeddings(made)

    @contextlib.contextmanager
    def worker(self, role: str) -> Iterator[Workers]:
        """A worker process of this role, from the moment when it is ready."""
        with Workers(self.folder / "bundle", self.folder, self.settings, (role,)) as workers:
            workers.wait_until_ready()
            yield workers

    def settle(self, role: str, timeout_s: float = 240.0) -> None:
        """Wait until a role's group has committed everything that lies in its topics."""
        lag = Lag(self.kafka, {group_id(self.kafka, role): group_topics(self.kafka, role)})
        deadline = time.monotonic() + timeout_s
        while lag.rows():
            assert time.monotonic() < deadline, f"{lag.detail()} after {timeout_s:g} s"
            time.sleep(0.02)


@contextlib.contextmanager
def stand(partitions: int, settings: Mapping[str, str] | None = None) -> Iterator[Stand]:
    """Kafka and topics in a temporary folder. `settings` are environment variables of the workers.

    SIGTERM ends the bench by an exception, so that broker and workers are stopped then, too.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (
        tempfile.TemporaryDirectory(prefix="solaris-bench-") as place,
        Broker.start(Path(place) / "broker", port=0) as broker,
    ):
        kafka = KafkaConfig(bootstrap=broker.bootstrap)
        ensure_topics(kafka, partitions=partitions)
        bundle = untrained_bundle(1, d=D, content_dims=CONTENT, buckets=(1 << 17, 1 << 10, 1 << 16))
        bundle.save(Path(place) / "bundle")
        chosen = {"SOLARIS_KAFKA__BOOTSTRAP": broker.bootstrap, "OMP_NUM_THREADS": "1", **(settings or {})}
        yield Stand(kafka, Path(place), bundle, chosen, broker.pid)


@contextlib.contextmanager
def first_in_line(pids: Iterable[int], wanted: bool = True) -> Iterator[None]:
    """Real-time scheduling (round robin) for all threads of these processes: other work on the machine waits for them.

    What is measured so is what a machine without other work would give, but for caches and clock rates. Needs the right to do it
    (root, or CAP_SYS_NICE); threads that begin later are not raised.
    """
    pids = list(pids) if wanted else []
    _schedule(pids, os.SCHED_RR, 10)
    try:
        yield
    finally:
        _schedule(pids, os.SCHED_OTHER, 0)


def _schedule(pids: Iterable[int], policy: int, priority: int) -> None:
    for thread in [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]:
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, all of its threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS

"""A worker process from its settings: loads the bundle, the catalogue, and runs its role until it is told to stop.

In: settings, a bundle's folder, a state folder. Out: an exit code. No bundle, no start: random weights are never served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents import infer as infer_shell
from agents import serve as serve_shell
from agents import speculate as speculate_shell
from agents.app import WorkerSettings, run_worker
from agents.catalogue import Catalogue
from agents.follow import ItemLetters, follow
from agents.groups import group_id
from agents.kafka import KafkaConfig, TopicAdmin, check_copartitioning
from agents.shell import WorkerContext, add_counts, topic_states
from agents.stats import StatsFile
from agents.transport.partition import InputTopic, PartitionProcessor, PartitionStart
from agents.transport.wiring import TransportConfig
from models.bundle import Bundle
from models.engine import Engine
from schemas.errors import TopicError
from schemas.topics import TOPICS
from streams.dispatch import InferConfig
from streams.infer import Infer
from streams.items import ItemIndex, ItemsConfig
from streams.serve import ServeConfig
from streams.speculate import SpeculateConfig
from streams.state.rocks import StateConfig

log = logging.getLogger("solaris.worker")


@dataclass(frozen=True)
class WorkerConfig:
    """Everything that a worker is given. `ttl_ms` and the histories' lengths of speculation are serve's."""

    kafka: KafkaConfig
    bundle: Path
    state_dir: Path
    stats: Path | None = None
    device: str = "cpu"
    items: ItemsConfig = field(default_factory=ItemsConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    speculate: SpeculateConfig = field(default_factory=SpeculateConfig)
    infer: InferConfig = field(default_factory=InferConfig)
    state: StateConfig = field(default_factory=StateConfig)


def run(role: str, config: WorkerConfig) -> int:
    """Run one role; the exit code. Raises `SolarisError` before anything starts where something is missing."""
    parts = {"speculate": ("ranker", "priors"), "infer": ("foundation", "compressor"), "serve": ("ranker", "base")}[
        role
    ]
    bundle = Bundle.load(config.bundle, parts, config.device if role == "infer" else "cpu")
    partitions = _partitions(config.kafka)
    content = _content_dims(bundle)
    items = ItemIndex(config.items.items_max, content_dims=content)
    letters = ItemLetters(config.kafka, partitions) if role == "speculate" else None
    catalogue = Catalogue(config.kafka, items.update, letters.refuse if letters is not None else None)
    catalogue.load()
    try:
        if role == "infer":
            return _run_infer(config, bundle, items, catalogue)
        return _run_stateful(role, config, bundle, items, catalogue, letters, partitions)
    finally:
        catalogue.close()


def _run_infer(config: WorkerConfig, bundle: Bundle, items: ItemIndex, catalogue: Catalogue) -> int:
    worker: list[infer_shell.InferWorker] = []
    stats = StatsFile(config.stats, "infer", lambda: worker[0].counts())
    engine = Infer(Engine(bundle, items, config.device))
    worker.append(infer_shell.InferWorker(config.kafka, config.infer, config.transport, engine, catalogue, stats))
    worker[0].run()
    return 0


def _run_stateful(
    role: str,
    config: WorkerConfig,
    bundle: Bundle,
    items: ItemIndex,
    catalogue: Catalogue,
    letters: ItemLetters | None,
    partitions: int,
) -> int:
    shell = serve_shell if role == "serve" else speculate_shell
    context = WorkerContext(
        config.kafka,
        partitions,
        config.state_dir,
        config.state,
        topic_states(config.kafka, shell.TOPICS),
        items,
        catalogue,
    )
    context.stats = StatsFile(config.stats, role, lambda: _gathered(context))
    make: Callable[[PartitionStart], PartitionProcessor]
    topics: tuple[InputTopic, ...]
    if role == "serve":
        topics = serve_shell.input_topics(config.kafka)

        def make(start: PartitionStart) -> PartitionProcessor:
            return serve_shell.ServeProcessor(context, bundle, config.serve, start)
    else:
        topics = speculate_shell.input_topics(config.kafka)

        def make(start: PartitionStart) -> PartitionProcessor:
            return speculate_shell.SpeculateProcessor(context, bundle, config.speculate, start)

    settings = WorkerSettings(group_id(config.kafka, role), topics, config.kafka, config.transport)
    code = run_worker(settings, make, lambda: _beside(context, letters))
    context.stats.close()
    return code


async def _beside(context: WorkerContext, letters: ItemLetters | None) -> None:
    """Counts from the start, not from the first partition: a member that has none, and stands by, lives and shows it."""
    assert context.stats is not None, "a worker has counts, even if it writes them nowhere"
    context.stats.start(asyncio.get_running_loop())
    await follow(context.catalogue, letters, context.processors)


def _gathered(context: WorkerContext) -> tuple[bool, dict[str, Any]]:
    """Ready once every partition here is restored; counts summed over partitions, the partitions of the past included."""
    here = dict(context.processors)
    total: dict[str, Any] = {f"catalogue_{name}": count for name, count in context.catalogue.counts.items()}
    for counts in (context.past, *(processor.counts() for processor in here.values())):
        add_counts(total, counts)
    ready = bool(here) and all(processor.ready for processor in here.values())
    return ready, total | {"partitions": sorted(here)}


def _partitions(kafka: KafkaConfig) -> int:
    there = TopicAdmin(kafka).partitions()
    missing = [kafka.topic(spec) for spec in TOPICS if kafka.topic(spec) not in there]
    if missing:
        raise TopicError(f"topics are missing: {', '.join(missing)}; create them with `solaris topics create`")
    count = check_copartitioning(kafka, TOPICS, there)
    assert count is not None, "there are co-partitioned topics in the table"
    return count


def _content_dims(bundle: Bundle) -> int:
    for part in ("ranker", "foundation"):
        if bundle.has(part):
            return int(getattr(bundle.parts[part].config, "content_dims", 0))
    return 0

"""From settings to a running worker: builds the Faust app on the batch transport, runs it, stops it cleanly.

In: group, topics, a factory of partition processors, connection settings. Out: an exit code.
Never: what a processor does.

    0   stopped by SIGTERM or SIGINT: work in hand ended, outputs acknowledged, offsets committed
    1   stopped by a fault that is not a record's; nothing was committed after it
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import faust
from faust.serializers.schemas import Schema

from schemas.errors import FatalError, TopicError
from schemas.topics import TopicSpec

from .kafka import KafkaConfig, TopicAdmin, faust_settings, librdkafka_settings
from .transport.driver import BatchTransport
from .transport.fetch import new_event_loop
from .transport.output import Output
from .transport.partition import Factory, InputTopic
from .transport.wiring import Delivery, TransportConfig, Wiring

log = logging.getLogger("solaris.app")

Beside = Callable[[], Awaitable[None]]

SWITCH_S = 0.0002
"""After this the processor gives the interpreter to the consumer's thread. At Python's 5 ms every step of a fetch waits for a whole
batch: under load a request's p99 is up to twice as long (docs/log.md)."""

FAULT_STOP_MS_MAX = 5_000  # after a fault nothing is committed, so nothing is worth a longer wait


@dataclass(frozen=True)
class WorkerSettings:
    """A worker: its consumer group, the topics that its members share out (by full name), and how to reach Kafka."""

    group: str
    topics: tuple[InputTopic, ...]
    kafka: KafkaConfig
    transport: TransportConfig = field(default_factory=TransportConfig)


class BatchSchema(Schema[None, Delivery]):
    """Leaves a batch as it is."""

    async def decode(self, app: Any, message: Any, *, propagate: bool = False) -> Any:  # noqa: ARG002 - Faust's signature
        """An event whose value is the batch."""
        return app.create_event(None, message.value, None, message)

    def compile(self, app: Any, **_: Any) -> Any:
        """The function that Faust calls for each message."""

        async def decode(message: Any, *, propagate: bool = False) -> Any:  # noqa: ARG001
            return app.create_event(None, message.value, None, message)

        return decode


class SolarisApp(faust.App):
    """A Faust app on the batch transport. It makes no directory and no topic of its own."""

    wiring: Wiring

    async def on_first_start(self) -> None:
        """The stock app makes a data directory here; ours has no tables."""

    def _new_transport(self) -> BatchTransport:
        return BatchTransport(self.conf.broker_consumer, self)

    def _new_producer_transport(self) -> BatchTransport:
        return BatchTransport(self.conf.broker_producer, self)


def partition_count(kafka: KafkaConfig, topics: Sequence[str]) -> int:
    """The one partition count of `topics`, by their full names. TopicError if some are missing or two counts differ."""
    specs = [TopicSpec(name, "user", "binary", None) for name in topics]
    counts = TopicAdmin(replace(kafka, topic_prefix="")).partitions(specs)
    missing = [name for name in topics if name not in counts]
    if missing:
        raise TopicError(f"topics are missing: {', '.join(missing)}. Create them with `solaris topics create`.")
    first = topics[0]
    for name in topics:
        if counts[name] != counts[first]:
            raise TopicError(
                f"{first} has {counts[first]} partitions and {name} has {counts[name]}: they are read together and must have "
                "the same count."
            )
    return counts[first]


def build(settings: WorkerSettings, make: Factory) -> SolarisApp:
    """The app of a worker, ready to run. TopicError if its topics are not there."""
    names = [topic.name for topic in settings.topics]
    config = settings.transport
    partitions = partition_count(settings.kafka, names)
    output = Output(
        librdkafka_settings(settings.kafka, producer=True),
        delivery_ms_max=config.delivery_ms_max,
        queue_rows_max=config.output_rows_max,
        queue_kbytes_max=config.output_kbytes_max,
        record_bytes_max=config.record_bytes_max,
        linger_ms=config.linger_ms,
    )
    app = SolarisApp(
        settings.group,
        **faust_settings(settings.kafka),
        store="memory://",
        processing_guarantee="at_least_once",
        stream_wait_empty=True,
        stream_buffer_maxsize=config.batches_in_flight_max,
        broker_commit_interval=config.commit_ms / 1000,
        broker_session_timeout=config.session_ms / 1000,
        broker_heartbeat_interval=config.heartbeat_ms / 1000,
        broker_rebalance_timeout=config.rebalance_ms / 1000,
        broker_request_timeout=config.request_ms / 1000,
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        autodiscover=False,
    )
    app.wiring = Wiring(settings.topics, make, output, config, partitions)
    runner = app.wiring.runner
    channel = app.topic(*names, schema=BatchSchema(), acks=False, internal=False)

    @app.agent(channel, name="batches")
    async def batches(stream: faust.StreamT[Delivery]) -> None:
        async for delivery in stream:
            runner.submit(delivery.batch, delivery.ticket)

    return app


async def run(app: SolarisApp, beside: Beside | None = None) -> int:
    """Run until SIGTERM, SIGINT or a fault; drain, flush, commit, close. Returns the exit code."""
    wiring = app.wiring
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    wiring.on_fail = stop.set
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    wiring.runner.start()
    started = loop.create_task(_started(app))
    company = loop.create_task(_accompanied(app, beside))
    watch = loop.create_task(app.wait_until_stopped(), name="crash-watch")
    stopping = loop.create_task(stop.wait())
    await asyncio.wait([watch, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        wiring.fail(FatalError(f"the consumer stopped: {app.crash_reason!r}"))
    started.cancel()
    await asyncio.gather(started, return_exceptions=True)
    company.cancel()
    await asyncio.gather(company, return_exceptions=True)
    await _stopped(app)
    await wiring.runner.stop()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    wiring.close()
    left = await loop.run_in_executor(None, wiring.output.close, 5.0)
    if left and wiring.failure is None:
        wiring.fail(
            FatalError(f"{left} outputs were not acknowledged at the end; they are sent again after the next start")
        )
    return 0 if wiring.failure is None else 1


async def _stopped(app: SolarisApp) -> None:
    """Stop Faust; bounded, since its consumer waits for answers of brokers that may be gone."""
    wiring = app.wiring
    timeout_ms = FAULT_STOP_MS_MAX if wiring.failure is not None else wiring.config.stop_ms_max
    stopping = asyncio.get_running_loop().create_task(app.stop())
    _, late = await asyncio.wait([stopping], timeout=timeout_ms / 1000)  # not wait_for: Faust swallows cancellation
    if late:
        wiring.stuck = True
        wiring.fail(FatalError(f"the consumer did not stop within {timeout_ms} ms; what is not committed is repeated"))
        stopping.cancel()
    else:
        stopping.result()


async def _started(app: SolarisApp) -> None:
    try:
        await app.start()
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 - the top of the shell: said and turned into an exit code
        app.wiring.fail(error)


async def _accompanied(app: SolarisApp, beside: Beside | None) -> None:
    if beside is None:
        return
    try:
        await beside()
    except asyncio.CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 - the top of the shell: said and turned into an exit code
        app.wiring.fail(error)


def run_worker(settings: WorkerSettings, make: Factory, beside: Beside | None = None) -> int:
    """Build and run a worker in this process; its exit code. TopicError before anything starts if its topics are not there.

    `beside` runs in the same event loop for as long as the worker does; if it raises, the worker stops with that fault.
    If the consumer's thread can't be ended (its broker is gone), the process ends here, with code 1.
    """
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        app = runner.run(_build(settings, make))
        code = runner.run(run(app, beside))
        if app.wiring.stuck:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


async def _build(settings: WorkerSettings, make: Factory) -> SolarisApp:
    return build(settings, make)

"""The consumer thread: takes what aiokafka fetched and makes record batches of it.

In: which partitions take batches, positions to seek to, offsets to commit. Out: polls of record batches; the group's and
the log's offsets. Never: a record of an assignment that was not sought yet, a guess where to read (`auto_offset_reset` is off).

Faust runs aiokafka in a thread with an event loop of its own, so heartbeats go on while processors compute. Its own `getmany`
is not used: it polls with sleeps of up to a second while partitions are held back, returns records of an assignment before
it was sought, and never asks the coordinator for its errors (a refused group would wait for ever).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import aiokafka
import numpy as np
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.errors import (
    ConsumerStoppedError,
    IllegalGenerationError,
    IllegalStateError,
    KafkaError,
    NoOffsetForPartitionError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from aiokafka.structs import OffsetAndMetadata, TopicPartition
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, credentials_to_aiokafka_auth, server_list

from .assignor import CopartitionedAssignor
from .batch import RecordBatch
from .ledger import Commit, Partition

_T = TypeVar("_T")
_PREFETCH_BACKOFF_S = 0.005
_UNSOUGHT_S = 0.01
_COMMIT_BACKOFF_S = 0.1


@dataclass(frozen=True)
class Found:
    """What a poll found for a partition: the position moved from `start` to `end`; `batch` is None if no record lies between."""

    partition: Partition
    start: int
    end: int
    batch: RecordBatch | None


@dataclass(frozen=True)
class Offsets:
    """Of one topic-partition: what the group holds (None = never committed), and the log's ends [begin, end)."""

    committed: Commit | None
    begin: int
    end: int


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The fastest there is: a wake-up of uvloop's costs half of the standard library's."""
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class BatchConsumerThread(AIOKafkaConsumerThread):
    """aiokafka's consumer in its thread. Methods named `in_thread_*` run there; the others are called from the app's loop."""

    session: int = 0  # of the assignment that was sought last; polls of another one find nothing
    _sought: Any = None  # aiokafka's assignment object of that session
    _generation: int = -1  # of the group when it was sought
    _waiter: asyncio.Future[None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, thread_loop=new_event_loop(), **kwargs)
        self._close_thread_loop_on_stop = True  # it is ours, and used by nobody else

    async def run(self, coroutine: Any, timeout_s: float | None = None) -> Any:
        """Run a coroutine in the thread's loop. (Faust's method queue has two workers, and a poll keeps one of them.)"""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.thread_loop)
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)

    def wake(self) -> None:
        """Let a waiting poll look again: a partition takes batches again, or the session ended."""
        with contextlib.suppress(RuntimeError):  # the thread's loop is closed at the very end
            self.thread_loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _create_worker_consumer(self, transport: Any) -> aiokafka.AIOKafkaConsumer:
        """As the stock one, but: our assignor, committed transactions only, short waits, no silent reset."""
        conf, config = self.app.conf, cast(Any, self.app).wiring.config
        self._assignor = CopartitionedAssignor()
        return aiokafka.AIOKafkaConsumer(
            **credentials_to_aiokafka_auth(conf.broker_credentials, conf.ssl_context),
            bootstrap_servers=server_list(transport.url, transport.default_port),
            client_id=conf.broker_client_id,
            group_id=conf.id,
            partition_assignment_strategy=[self._assignor],
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            fetch_min_bytes=1,
            fetch_max_wait_ms=config.fetch_wait_ms,
            fetch_max_bytes=config.fetch_bytes_max,
            max_partition_fetch_bytes=config.batch_bytes_max,
            max_poll_interval_ms=config.poll_interval_ms_max,
            session_timeout_ms=config.session_ms,
            heartbeat_interval_ms=config.heartbeat_ms,
            rebalance_timeout_ms=config.rebalance_ms,
            request_timeout_ms=config.request_ms,
            metadata_max_age_ms=config.metadata_age_ms_max,
            check_crcs=True,
        )

    async def on_start(self) -> None:
        """Start the consumer, and shorten how long one held-back partition keeps the others from being fetched."""
        await super().on_start()
        self._ensure_consumer()._fetcher._prefetch_backoff = _PREFETCH_BACKOFF_S

    async def in_thread_poll(
        self, session: int, open_: Iterable[Partition], rows_max: Mapping[str, int], timeout_s: float
    ) -> list[Found]:
        """What was fetched for the `open_` partitions, at most one batch each; waits up to `timeout_s` for something."""
        consumer = self._ensure_consumer()
        fetcher, subscriptions = consumer._fetcher, consumer._subscription
        with subscriptions.fetch_context():
            deadline = self.thread_loop.time() + timeout_s
            while True:
                if consumer._closed or fetcher._closed:
                    raise ConsumerStoppedError()
                consumer._coordinator.check_errors()
                if session != self.session or not self._is_sought(subscriptions):
                    await asyncio.sleep(
                        _UNSOUGHT_S
                    )  # a rebalance is on its way to the app; don't spin until it is there
                    return []
                found = _drain(fetcher, self._sought, set(open_), rows_max)
                left = deadline - self.thread_loop.time()
                if found or left <= 0:
                    return found
                self._waiter = fetcher._create_fetch_waiter()
                await asyncio.wait([self._waiter], timeout=left)
                if self._waiter.done():
                    self._waiter.result()
                else:
                    self._waiter.cancel()

    def _is_sought(self, subscriptions: Any) -> bool:
        return (
            not subscriptions.reassignment_in_progress
            and self._sought is not None
            and subscriptions.subscription.assignment is self._sought
            and self._sought.active
        )

    async def in_thread_offsets(self, partitions: Collection[Partition]) -> dict[Partition, Offsets]:
        """The group's commits and the log's ends of all `partitions`, in three requests."""
        consumer = self._ensure_consumer()
        tps = [TopicPartition(*partition) for partition in partitions]
        committed, begin, end = await asyncio.gather(
            consumer._coordinator.fetch_committed_offsets(tps),
            consumer.beginning_offsets(tps),
            consumer.end_offsets(tps),
        )
        offsets = {}
        for tp in tps:
            held = committed.get(tp)
            commit = None if held is None else Commit(held.offset, held.metadata or "")
            offsets[(tp.topic, tp.partition)] = Offsets(commit, begin[tp], end[tp])
        return offsets

    async def in_thread_seek(self, positions: Mapping[Partition, int], session: int) -> None:
        """Seek, and let polls of `session` find records. IllegalStateError if the assignment is another by now."""
        consumer = self._ensure_consumer()
        subscription = consumer._subscription.subscription
        assignment = subscription.assignment if subscription is not None else None
        if assignment is None or consumer._subscription.reassignment_in_progress or assignment.tps != set(positions):
            raise IllegalStateError("the assignment changed before it was sought")
        for partition, position in positions.items():
            consumer.seek(TopicPartition(*partition), position)
        self._sought, self._generation, self.session = assignment, consumer._coordinator.generation, session

    async def in_thread_reseek(self, partition: Partition, position: int) -> None:
        """Read one partition of the same session again from `position`."""
        self._ensure_consumer().seek(TopicPartition(*partition), position)

    async def in_thread_commit(self, commits: Mapping[Partition, Commit]) -> bool:
        """Commit; False if the group has rebalanced since the seek, or refuses. KafkaError for anything else that lasts.

        Offsets are of the assignment that was sought, so they go to the group as the member of that generation or not at
        all. aiokafka's own `commit` sends whatever generation it holds when the request goes out, also in its retries: after
        a rebalance, that would rewind what a successor committed meanwhile; without a generation, the broker would take it
        from an empty group.
        """
        coordinator: Any = self._ensure_consumer()._coordinator
        offsets = {TopicPartition(*partition): OffsetAndMetadata(*commit) for partition, commit in commits.items()}
        while True:
            await coordinator.ensure_coordinator_known()
            async with coordinator._commit_lock:
                if not self._is_member(coordinator):
                    return False
                try:
                    await coordinator._do_commit_offsets(self._sought, offsets)
                    return True
                except (UnknownMemberIdError, IllegalGenerationError, RebalanceInProgressError):
                    return False
                except KafkaError as error:
                    if not error.retriable:
                        raise
            await asyncio.sleep(_COMMIT_BACKOFF_S)

    def _is_member(self, coordinator: Any) -> bool:
        """Whether the group still knows this consumer as it was at the seek: no await may come before the request is made."""
        subscription = coordinator._subscription.subscription
        return (
            self._sought is not None
            and subscription is not None
            and subscription.assignment is self._sought
            and coordinator.generation == self._generation
        )

    def partition_count(self, topic: str) -> int:
        """How many partitions the topic has, as the client last heard."""
        return len(self._ensure_consumer()._client.cluster.partitions_for_topic(topic) or ())


def _drain(fetcher: Any, assignment: Any, open_: set[Partition], rows_max: Mapping[str, int]) -> list[Found]:
    found: list[Found] = []
    for tp in list(fetcher._records):
        result = fetcher._records[tp]
        if not isinstance(result, FetchResult):
            del fetcher._records[tp]
            fetcher._notify(fetcher._wait_consume_future)
            with contextlib.suppress(NoOffsetForPartitionError):  # from before the seek; we never rely on it
                result.check_raise()
            continue
        if tp not in open_:
            continue
        state = assignment.state_value(tp)
        start = state.position
        records = result.getall(rows_max[tp.topic])
        if not result.has_more():
            del fetcher._records[tp]
            fetcher._notify(fetcher._wait_consume_future)
        if state.position > start:
            found.append(Found(tp, start, state.position, _batch(tp, records, state.position) if records else None))
    return found


def _batch(tp: TopicPartition, records: list[Any], next_offset: int) -> RecordBatch:
    count = len(records)
    return RecordBatch(
        tp.topic,
        tp.partition,
        np.fromiter((record.offset for record in records), np.int64, count),
        [record.key for record in records],
        [record.value for record in records],
        np.fromiter((record.timestamp for record in records), np.int64, count),
        records[0].timestamp_type == 1,
        [record.headers for record in records],
        next_offset,
    )

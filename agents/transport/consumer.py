"""The consumer as Faust sees it: hands an agent one record batch per partition and poll, seeks to the processors' positions,
and commits what the ledger allows.

In: Faust's calls (poll, revoked, assigned, seek, commit, stop). Out: record batches to the agent; commits to the group.
Never: Faust's acks (off: it acknowledges an event when its handler raised, too, and treats every offset gap as done).

A *session* lasts from a seek to the next revocation. A poll of another session is thrown away; its records were not
entered in the ledger, and the next seek brings them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, cast

from aiokafka.errors import IllegalStateError, KafkaError
from faust.transport.drivers.aiokafka import Consumer
from faust.types import TP, ConsumerMessage, Message

from schemas.errors import FatalError

from .fetch import BatchConsumerThread, Found
from .ledger import Partition
from .wiring import Delivery, Wiring

log = logging.getLogger("solaris.transport")

_POLL_S = 1.0


class BatchConsumer(Consumer):
    """Faust's consumer with our ledger in place of its acks."""

    _thread: BatchConsumerThread
    _subscribed: frozenset[str] = frozenset()
    _session: int = 0  # 0 while nothing may be polled

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wiring: Wiring = cast(Any, self.app).wiring
        self.wiring.on_room = self._on_room
        self._sessions = 0
        self._sought = asyncio.Event()
        self._committing = asyncio.Lock()
        self._open: frozenset[Partition] = frozenset()
        self._ahead: tuple[int, asyncio.Task[Any]] | None = None  # the poll that was begun, and its session

    def _new_consumer_thread(self) -> BatchConsumerThread:
        return BatchConsumerThread(self, loop=self.loop, beacon=self.beacon)

    async def subscribe(self, topics: Iterable[str]) -> None:
        """Subscribe once: subscribing to the same topics again makes the whole group rebalance."""
        wanted = frozenset(topics)
        if wanted != self._subscribed:
            self._subscribed = wanted
            await super().subscribe(topics=wanted)

    def on_buffer_full(self, tp: TP) -> None:
        """Nothing: the ledger's depth holds a partition back, not the length of Faust's queue."""

    def on_buffer_drop(self, tp: TP) -> None:
        """Nothing, as above."""

    def verify_event_path(self, now: float, tp: TP) -> None:
        """Nothing: the stock check compares monotonic with wall time and looks at acks, which are off."""

    # -- reading ------------------------------------------------------------------------------------------------------

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, Message]]:  # noqa: ARG002 - Faust's signature
        """One poll: a message per partition, its value the record batch with its ticket."""
        if not self.flow_active:
            await self.wait(self.can_resume_flow.wait())
        if not self._session:
            await self.wait(self._sought.wait())
        session = self._session
        if self.should_stop or not session:
            return
        self._refresh_open()
        deliveries = [await self._enter(item) for item in await self._poll(session)]
        self._poll_ahead(session)
        for delivery in deliveries:
            if session != self._session:
                return
            if delivery is not None:
                yield TP(*delivery.ticket.partition), self._message(delivery)

    async def _poll(self, session: int) -> list[Found]:
        """What the poll that was begun ahead found, or a new one if it was of another session."""
        begun, poll = self._ahead or (0, None)
        self._ahead = None
        if poll is None or begun != session:
            poll = self._begin_poll(session)
        found: list[Found] = await poll
        return found if session == self._session else []

    def _poll_ahead(self, session: int) -> None:
        """Begin the next poll before this one's batches are processed: meanwhile the thread takes what comes and asks for more,
        where aiokafka would wait with its next request until somebody took what it has. All that was found is entered by now."""
        if session == self._session and not self.should_stop:
            self._ahead = session, self._begin_poll(session)

    def _begin_poll(self, session: int) -> asyncio.Task[Any]:
        thread, rows_max = self._thread, self.wiring.rows_max
        poll = asyncio.ensure_future(thread.run(thread.in_thread_poll(session, _Live(self), rows_max, _POLL_S)))
        poll.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # whoever waits for it hears of an error
        return poll

    async def _enter(self, item: Found) -> Delivery | None:
        """Enter what was found in the ledger. A poll that was lost on its way here shows as a jump: read it again."""
        ledger = self.wiring.ledger
        if item.partition not in ledger.assigned():
            return None
        expected = ledger.position(item.partition)
        if item.start != expected:
            log.warning("%s-%d: read from %d again, a poll was lost", *item.partition, expected)
            await self._thread.run(self._thread.in_thread_reseek(item.partition, expected))
            return None
        if item.batch is None:
            ledger.advance(item.partition, item.end)
            return None
        ticket = ledger.add(item.partition, item.end)
        return None if ticket is None else Delivery(item.batch, ticket)

    def _message(self, delivery: Delivery) -> Message:
        batch = delivery.batch
        return cast(
            Message,
            ConsumerMessage(
                batch.topic, batch.partition, batch.first_offset, float(batch.append_ts_ms[0]) / 1000.0, 0, None,
                None, cast(Any, delivery), None, tp=TP(batch.topic, batch.partition), generation_id=self.app.consumer_generation_id,
            ),
        )  # fmt: skip

    def open_partitions(self) -> frozenset[Partition]:
        """The partitions that take another batch. Read by the consumer thread; the set is replaced, never changed."""
        return self._open

    def _refresh_open(self) -> None:
        ledger, depth_max = self.wiring.ledger, self.wiring.config.batches_in_flight_max
        self._open = frozenset(tp for tp in ledger.assigned() if ledger.depth(tp) < depth_max)

    def _on_room(self) -> None:
        before = self._open
        self._refresh_open()
        if self._open - before:
            self._thread.wake()

    # -- assignment ---------------------------------------------------------------------------------------------------

    def _end_session(self) -> None:
        self._session = 0
        self._sought.clear()
        self._open = frozenset()
        self._thread.wake()

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """End the session first. The stock method then stops the flow and calls `wait_empty`, and only then lets go."""
        self._end_session()
        await super().on_partitions_revoked(revoked)

    async def wait_empty(self) -> None:
        """Before partitions go: drop what has not begun, wait for what has, flush, commit. Flushed first, the marks are exact."""
        self._end_session()
        wiring = self.wiring
        wiring.ledger.close(wiring.ledger.assigned())
        wiring.runner.drop_waiting()
        if not await wiring.runner.drain(wiring.config.drain_ms_max / 1000):
            wiring.fail(FatalError(
                f"a batch did not end within {wiring.config.drain_ms_max} ms while its partition was being taken away; "
                "make batches smaller (batch_rows_max) or the limit (drain_ms_max) larger"
            ))  # fmt: skip
        await self._flushed()
        await self.force_commit()

    async def perform_seek(self) -> None:
        """After an assignment: close the processors that went, make those that came, seek each to where it must read."""
        assigned = {(tp.topic, tp.partition) for tp in self.assignment()}
        self._end_session()
        wiring, rebalance = self.wiring, self.app.rebalancing_count
        try:
            wiring.check_assignment(assigned, self._thread.partition_count)
            wiring.release(assigned)
            offsets = await self._thread.run(self._thread.in_thread_offsets(assigned)) if assigned else {}
            self._check_current(rebalance)
            positions = wiring.place(offsets)
        except FatalError as error:
            wiring.fail(error)
            return
        self._sessions += 1
        if assigned:
            await self._thread.run(self._thread.in_thread_seek(positions, self._sessions))
            self._check_current(rebalance)
        for partition, position in positions.items():
            held = offsets[partition].committed
            wiring.ledger.assign(partition, position, None if held is None else held.offset)
            self._read_offset[TP(*partition)] = None
        if any(held.committed is None for held in offsets.values()):
            await self.force_commit()  # before the first batch: a crash before the first commit would leave no marks
        if assigned:
            self._session = self._sessions
            self._sought.set()

    def _check_current(self, rebalance: int) -> None:
        """IllegalStateError, which Faust's recovery takes for "rebalancing again", if another rebalance began meanwhile."""
        if self.app.rebalancing_count != rebalance:
            raise IllegalStateError("another rebalance began before the partitions were sought")

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Seek to our positions instead (Faust calls `perform_seek` for that)."""
        await self.perform_seek()
        return {TP(*tp): self.wiring.ledger.position(tp) for tp in self.wiring.ledger.assigned()}

    # -- committing ---------------------------------------------------------------------------------------------------

    async def force_commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:  # noqa: ARG002
        """Flush outputs, then commit; the ledger advances only if the broker accepted."""
        wiring = self.wiring
        async with self._committing:
            if wiring.failure is not None:
                return False
            commits = wiring.ledger.committable(wiring.mark)
            if not commits:
                return False
            if not await self._flushed():
                return False
            try:
                accepted = await self._thread.run(
                    self._thread.in_thread_commit(commits), wiring.config.commit_ms_max / 1000
                )
            except TimeoutError:
                log.warning(
                    "the group's coordinator did not take a commit within %d ms; trying again",
                    wiring.config.commit_ms_max,
                )
                return False
            except KafkaError as error:
                wiring.fail(FatalError(f"the group {self.app.conf.id} can't commit: {error!r}"))
                return False
            if accepted:
                wiring.ledger.committed(commits)
            else:
                log.info(
                    "the group refused a commit because it has rebalanced; the work is repeated by whoever has it now"
                )
            return bool(accepted)

    async def _flushed(self) -> bool:
        """Whether everything that was sent is acknowledged; a delivery that failed stops the process."""
        timeout_ms = self.wiring.config.barrier_ms_max
        try:
            if await self.wiring.output.barrier(timeout_ms / 1000):
                return True
            log.warning("outputs were not acknowledged within %d ms: nothing committed", timeout_ms)
        except FatalError as error:
            self.wiring.fail(error)
        return False


class _Live:
    """The open partitions at the time of looking, so that a waiting poll sees what opened meanwhile."""

    def __init__(self, consumer: BatchConsumer) -> None:
        self._consumer = consumer

    def __iter__(self) -> Any:
        return iter(self._consumer.open_partitions())

"""One batch at a time to its partition's processor, the most urgent first.

In: record batches with their tickets. Out: calls of `PartitionProcessor.process`, tickets that are done, a fatal error.
Never: two calls into one partition at once, a commit, a lost record: one that raises each time goes to `on_poison`.

One task picks for all partitions, because processors run in the event loop's thread and only one can run anyway. A
processor that returns an awaitable keeps its partition busy while the others go on.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from schemas.errors import FatalError, StateError

from .batch import RecordBatch
from .ledger import Ledger, Ticket
from .output import HeldOutput
from .partition import PartitionProcessor

log = logging.getLogger("solaris.transport")

_TURNS = 4  # event loop turns between two batches, so that a poll that just arrived is queued before the next choice


@dataclass
class Seat:
    """A partition's processor with its output. `busy`: a call is under way."""

    processor: PartitionProcessor
    output: HeldOutput
    busy: bool = False
    waiting: list[tuple[int, int, RecordBatch, Ticket]] = field(default_factory=list)


class Runner:
    """Runs the batches of all partitions. `on_done` is called when a batch is done, `on_fatal` once with what stops the process."""

    def __init__(
        self,
        ledger: Ledger,
        priorities: Mapping[str, int],
        on_done: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
        retries: int = 2,
    ) -> None:
        self.seats: dict[int, Seat] = {}
        self.poisoned = 0
        self._ledger = ledger
        self._priorities = priorities
        self._on_done = on_done
        self._on_fatal = on_fatal
        self._retries = retries
        self._order = count()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to run, in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="solaris-runner")

    async def stop(self) -> None:
        """End the task; call it when nothing is under way any more."""
        for task in [self._task, *self._calls]:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def submit(self, batch: RecordBatch, ticket: Ticket) -> None:
        """Queue a batch. One whose partition has no processor any more is left to its next reader."""
        seat = self.seats.get(batch.partition)
        if seat is not None:
            heapq.heappush(seat.waiting, (self._priorities[batch.topic], next(self._order), batch, ticket))
            self._work.set()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no call is under way; False if that took longer than `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def drop_waiting(self) -> None:
        """Forget what has not begun (the ledger dropped it)."""
        for seat in self.seats.values():
            seat.waiting.clear()

    async def _run(self) -> None:
        try:
            while True:
                seat = self._next()
                if seat is None:
                    self._work.clear()
                    await self._work.wait()
                    continue
                _, _, batch, ticket = heapq.heappop(seat.waiting)
                if self._ledger.begin(ticket, seat.processor.mark(batch.topic)):
                    self._begin(seat, batch, ticket)
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - the top of the shell: everything ends the process, loudly
            self._on_fatal(error)

    def _next(self) -> Seat | None:
        ready = [seat for seat in self.seats.values() if seat.waiting and not seat.busy]
        return min(ready, key=lambda seat: seat.waiting[0][:2], default=None)

    def _begin(self, seat: Seat, batch: RecordBatch, ticket: Ticket) -> None:
        """Process in place; what the processor goes on with by itself becomes a task."""
        seat.busy = True
        self._idle.clear()
        call = asyncio.get_running_loop().create_task(self._process(seat, batch, ticket))
        self._calls.add(call)
        call.add_done_callback(lambda done: self._end(seat, done))

    def _end(self, seat: Seat, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        seat.busy = False
        if not self._calls:
            self._idle.set()
        self._work.set()
        if not call.cancelled() and (error := call.exception()) is not None:
            self._on_fatal(error)

    async def _process(self, seat: Seat, batch: RecordBatch, ticket: Ticket) -> None:
        await self._attempt(seat, batch)
        self._ledger.done(ticket)
        self._on_done()

    async def _attempt(self, seat: Seat, batch: RecordBatch) -> None:
        """Process; on an error halve, and of a single record try again, then poison."""
        error = await self._call(seat, batch)
        if error is None:
            return
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._attempt(seat, batch.slice(0, middle))
            await self._attempt(seat, batch.slice(middle, len(batch)))
            return
        for _ in range(self._retries):
            error = await self._call(seat, batch)
            if error is None:
                return
        self.poisoned += 1
        log.error(
            "%s-%d offset %d: dead-lettered, its handler raised %d times",
            batch.topic, batch.partition, batch.first_offset, self._retries + 1, exc_info=error,
        )  # fmt: skip
        seat.processor.on_poison(batch, 0, error)
        await seat.output.release()

    async def _call(self, seat: Seat, batch: RecordBatch) -> Exception | None:
        """One call of `process`: its outputs are released, or its error returned and its outputs discarded."""
        try:
            pending = seat.processor.process(batch)
            if pending is not None:
                await pending
        except (FatalError, StateError, MemoryError):
            raise  # ours, not the record's (see schemas.errors): the process stops
        except Exception as error:  # noqa: BLE001 - the processor is the shell's; the error goes to a dead letter
            seat.output.discard()
            return error
        await seat.output.release()
        return None

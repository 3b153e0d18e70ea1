"""Dispatch: a bounded queue of fm-requests that closes batches by size, delay or deadline.

In: fm-requests with partition, offset and append time, and `now` in append time (ms). Out: batches in the order of arrival, reasons
for every drop, and per partition the offset up to which everything is finished, so that the shell can commit. Never reads a clock,
and never lets a request whose deadline has passed reach the model: its answer would come too late to be worth its cost.

What is dropped, and why:
    deadline    now ≥ append time + `deadline_ms`, when it is offered or when its batch closes
    queue_full  the oldest give way: they are nearest to their deadlines, and newer requests carry fresher histories
    superseded  every pair of it was asked for again with a newer `as_of`: only the newest would be kept by any reader
    duplicate   every pair of it waits already with this `as_of` (fm-requests are delivered at least once)
A request that loses some of its pairs to the last two keeps the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schemas.inference import FmRequest

REASONS = ("deadline", "queue_full", "superseded", "duplicate")


@dataclass(frozen=True, slots=True)
class InferConfig:
    """`batch_pairs_max` pairs, or `delay_ms_max` after the oldest came, or `deadline_margin_ms` before the nearest deadline."""

    queue_pairs_max: int = 100_000
    batch_pairs_max: int = 4096
    delay_ms_max: int = 20
    deadline_margin_ms: int = 100


@dataclass(frozen=True, slots=True)
class Offered:
    """A request as it came from the log; `append_ms` is the record's time."""

    partition: int
    offset: int
    append_ms: int
    request: FmRequest

    @property
    def deadline_at(self) -> int:
        return self.append_ms + self.request.deadline_ms


class _Waiting:
    """A queued request and which of its pairs are still wanted; `live` is their number, 0 = dropped."""

    __slots__ = ("arrived_ms", "live", "offered", "wanted")

    def __init__(self, offered: Offered, arrived_ms: int) -> None:
        self.offered, self.arrived_ms = offered, arrived_ms
        self.wanted = dict.fromkeys(offered.request.items)
        self.live = len(self.wanted)

    def trimmed(self) -> Offered:
        """The request with the pairs that are still wanted."""
        request = self.offered.request
        if self.live == len(request.items):
            return self.offered
        place = {item: at for at, item in reversed(list(enumerate(request.items)))}  # the first of each
        keep = np.array([place[item] for item in self.wanted], np.int64)
        lesser = replace(
            request,
            items=list(self.wanted),
            p_asked=request.p_asked[keep],
            value=request.value[keep],
            sources=request.sources[keep],
        )
        return replace(self.offered, request=lesser)


class Dispatcher:
    """One queue for all partitions of a worker. A batch that was handed out is finished by `done`."""

    def __init__(self, config: InferConfig) -> None:
        self.config = config
        self.dropped = dict.fromkeys(REASONS, 0)
        self.dropped_pairs = dict.fromkeys(REASONS, 0)
        self.queued_pairs = 0
        self._queue: deque[_Waiting] = deque()
        self._pairs: dict[tuple[str, int, str], _Waiting] = {}
        self._open: dict[int, dict[int, bool]] = {}  # partition → offset in order → finished

    def __len__(self) -> int:
        return sum(waiting.live > 0 for waiting in self._queue)

    def offer(self, requests: Iterable[Offered], now_ms: int) -> None:
        """Take requests in offset order; what can't be taken is dropped, counted and finished."""
        for offered in requests:
            offsets = self._open.setdefault(offered.partition, {})
            if offered.offset in offsets:
                continue  # read again while it is still here
            offsets[offered.offset] = False
            waiting = _Waiting(offered, now_ms)
            if now_ms >= offered.deadline_at:
                self._drop(waiting, "deadline", len(offered.request.items))
                continue
            if not offered.request.items:
                self.done([offered])
                continue
            self._claim(waiting)
            if waiting.live:
                self._queue.append(waiting)
                self.queued_pairs += waiting.live
            self._make_room(waiting)

    def next_batch(self, now_ms: int, drain: bool = False) -> list[Offered]:
        """The next batch in order of arrival, empty when none is due; `drain` closes it whatever its size.

        A request of more than `batch_pairs_max` pairs goes alone.
        """
        self._expire(now_ms)
        if not self._queue or not (drain or self.wait_ms(now_ms) == 0):
            return []
        batch: list[Offered] = []
        pairs = 0
        while self._queue and (not batch or pairs + self._queue[0].live <= self.config.batch_pairs_max):
            waiting = self._queue.popleft()
            if waiting.live:
                pairs += waiting.live
                batch.append(waiting.trimmed())
                self._release(waiting)
        self.queued_pairs -= pairs
        return batch

    def wait_ms(self, now_ms: int) -> int | None:
        """Time until the next batch is due, None while nothing waits."""
        if self.queued_pairs >= self.config.batch_pairs_max:
            return 0
        live = [waiting for waiting in self._queue if waiting.live]
        if not live:
            return None
        delay = live[0].arrived_ms + self.config.delay_ms_max
        deadline = min(waiting.offered.deadline_at for waiting in live) - self.config.deadline_margin_ms
        return max(0, min(delay, deadline) - now_ms)

    def done(self, batch: Sequence[Offered]) -> None:
        """These are answered (or dead-lettered) and their outputs are safe."""
        for offered in batch:
            if offered.offset in self._open.get(offered.partition, ()):
                self._open[offered.partition][offered.offset] = True

    def finished(self) -> dict[int, int]:
        """Per partition the next offset to commit, where it moved since the last call: all before it are finished."""
        moved = {}
        for partition, offsets in self._open.items():
            while offsets and offsets[first := next(iter(offsets))]:
                del offsets[first]
                moved[partition] = first + 1
        return moved

    def revoke(self, partitions: Iterable[int]) -> None:
        """Forget everything of these partitions: they are another worker's now."""
        gone = set(partitions)
        for waiting in self._queue:
            if waiting.offered.partition in gone and waiting.live:
                self.queued_pairs -= waiting.live
                self._release(waiting)
        self._queue = deque(waiting for waiting in self._queue if waiting.live)
        for partition in gone:
            self._open.pop(partition, None)

    def _claim(self, waiting: _Waiting) -> None:
        """Settle with queued requests for the same pairs: the newest `as_of` stays, of equal ones the first."""
        request = waiting.offered.request
        for item in list(waiting.wanted):
            key = (request.user, request.space, item)
            holder = self._pairs.get(key)
            if holder is not None and holder.offered.request.as_of >= request.as_of:
                self._lose(waiting, item, "duplicate", queued=False)
                continue
            if holder is not None:
                self._lose(holder, item, "superseded", queued=True)
            self._pairs[key] = waiting

    def _lose(self, waiting: _Waiting, item: str, reason: str, queued: bool) -> None:
        del waiting.wanted[item]
        waiting.live -= 1
        self.dropped_pairs[reason] += 1
        self.queued_pairs -= queued
        if not waiting.live:
            self.dropped[reason] += 1
            self.done([waiting.offered])

    def _make_room(self, newest: _Waiting) -> None:
        """Drop from the oldest until the queue fits; a single request always fits."""
        while self.queued_pairs > self.config.queue_pairs_max and self._queue[0] is not newest:
            oldest = self._queue.popleft()
            if oldest.live:
                self.queued_pairs -= oldest.live
                self._drop(oldest, "queue_full", oldest.live)

    def _expire(self, now_ms: int) -> None:
        expired = [waiting for waiting in self._queue if waiting.live and now_ms >= waiting.offered.deadline_at]
        for waiting in expired:
            self.queued_pairs -= waiting.live
            self._drop(waiting, "deadline", waiting.live)
        if expired or (self._queue and not self._queue[0].live):
            self._queue = deque(waiting for waiting in self._queue if waiting.live)

    def _drop(self, waiting: _Waiting, reason: str, pairs: int) -> None:
        self.dropped[reason] += 1
        self.dropped_pairs[reason] += pairs
        self._release(waiting)
        self.done([waiting.offered])

    def _release(self, waiting: _Waiting) -> None:
        """Take a request out of the books; its place in the queue goes with the next sweep."""
        request = waiting.offered.request
        for item in waiting.wanted:
            key = (request.user, request.space, item)
            if self._pairs.get(key) is waiting:
                del self._pairs[key]
        waiting.live = 0

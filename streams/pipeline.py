"""The whole path in one process: a log's slices through speculate, a modelled FM and serve, on event time alone.

In: slices from `streams.feed`. Out: per slice the requests with their results, and counts. The same operators run live in
`agents/`; only the edges differ. An embedding counts from when it would have been *available*: asked at t, it is folded at the
first slice that begins at or after t + latency + queueing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from schemas.errors import BadRecord
from schemas.inference import Embeddings, FmRequest
from schemas.log import LoggedRequest
from schemas.ranking import TIERS, CheckedRequest, RankedResult
from streams.feed import PartitionSlice, Slice
from streams.serve import Serve
from streams.speculate import Speculate

Embed = Callable[[Sequence[FmRequest], Sequence[int]], Sequence[Embeddings | BadRecord]]
"""FM and compressor: requests and their offsets to embeddings, in the same order (`models.engine.Engine.embed`)."""


BeforeRank = Callable[[Serve, Sequence[CheckedRequest], Sequence[LoggedRequest]], None]


@dataclass(frozen=True)
class FmModel:
    """The FM as replay sees it: a latency and, unless `pairs_per_s_max` is 0, a capacity in pairs per second of event time."""

    latency_ms: int = 2_000
    pairs_per_s_max: float = 0.0
    batch_pairs: int = 2_048


@dataclass(frozen=True, slots=True)
class Ranked:
    """What one partition answered in one slice; the three lists run parallel."""

    partition: int
    requests: list[CheckedRequest]
    logged: list[LoggedRequest]
    results: list[RankedResult]


@dataclass
class PipelineCounts:
    """Counts since the start. `tiers` has one entry for each of TIERS, over ranked pairs."""

    events: int = 0
    requests: int = 0
    ranked_pairs: int = 0
    fm_requests: int = 0
    fm_pairs: int = 0
    vectors: int = 0
    refused_vectors: int = 0
    tiers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    def coverage(self) -> dict[str, float]:
        """Share of ranked pairs by tier."""
        return {tier: count / max(1, self.ranked_pairs) for tier, count in self.tiers.items()}


class Pipeline:
    """Partition p is `serves[p]` and, if there are any, `speculates[p]`. Without them nothing is asked of the FM."""

    def __init__(
        self,
        serves: Sequence[Serve],
        speculates: Sequence[Speculate] = (),
        embed: Embed | None = None,
        fm: FmModel | None = None,
        before_rank: BeforeRank | None = None,
    ) -> None:
        """`before_rank` is told of each share of requests before it is ranked: where training rows are taken."""
        assert not speculates or (embed is not None and len(speculates) == len(serves)), "speculation needs an FM"
        self.serves, self.speculates = serves, speculates
        self._fm = fm or FmModel()
        self.embed = embed
        self.answer_from = 0
        """Events below this offset are folded by speculation but not answered; training sets it to warm up without an FM."""
        self._before_rank = before_rank
        self.counts = PipelineCounts()
        self._waiting: list[
            tuple[int, int, int, int, FmRequest]
        ] = []  # available at, order, partition, offset, request
        self._order = 0
        self._free_at = 0.0
        self._next_fm = [0] * len(serves)
        self._next_embedding = [0] * len(serves)
        self._next_result = [0] * len(serves)

    def run(self, slices: Iterable[Slice]) -> Iterator[list[Ranked]]:
        """Step through the slices; yields what each of them ranked."""
        for piece in slices:
            yield self.step(piece)

    def step(self, piece: Slice) -> list[Ranked]:
        """One slice: vectors that are available, then requests, then events, then what speculation makes of both."""
        self._deliver(piece.first_ts)
        ranked = [self._rank(partition, share) for partition, share in piece.partitions.items() if share.requests]
        for partition, share in piece.partitions.items():
            if len(share.events):
                self._fold(partition, share, piece.last_ts)
        if self.speculates and not self.answer_from:
            for answer in ranked:
                self._next_result[answer.partition] += len(answer.results)
                asked = self.speculates[answer.partition].results(answer.results, self._next_result[answer.partition])
                self._queue(answer.partition, asked, piece.last_ts)
        return ranked

    def _rank(self, partition: int, share: PartitionSlice) -> Ranked:
        serve = self.serves[partition]
        if serve.cut_due():
            serve.install(serve.generation())
        if self._before_rank is not None:
            self._before_rank(serve, share.requests, share.logged)
        results = serve.rank(share.requests)
        self.counts.requests += len(results)
        for result in results:
            self.counts.ranked_pairs += len(result.items)
            for item in result.items:
                self.counts.tiers[item.tier] += 1
        return Ranked(partition, share.requests, share.logged, results)

    def _fold(self, partition: int, share: PartitionSlice, now: int) -> None:
        self.counts.events += len(share.events)
        self.serves[partition].events(share.events, share.next_event)
        if self.speculates:
            asked = self.speculates[partition].events(share.events, share.next_event, self.answer_from)
            self._queue(partition, asked, now)

    def _queue(self, partition: int, asked: Sequence[FmRequest], now: int) -> None:
        """Put FM work in line: it will be available after the latency, and after what stands before it."""
        for request in asked:
            pairs = len(request.items)
            self.counts.fm_requests += 1
            self.counts.fm_pairs += pairs
            if self._fm.pairs_per_s_max:
                self._free_at = max(self._free_at, float(now)) + 1000 * pairs / self._fm.pairs_per_s_max
            available = max(now, int(np.ceil(self._free_at))) + self._fm.latency_ms
            heapq.heappush(self._waiting, (available, self._order, partition, self._next_fm[partition], request))
            self._order += 1
            self._next_fm[partition] += 1

    def _deliver(self, now: int) -> None:
        """Fold every embedding that is available by `now`, in the order of availability."""
        due = []
        while self._waiting and self._waiting[0][0] <= now:
            due.append(heapq.heappop(self._waiting))
        for chunk in _chunks(due, self._fm.batch_pairs):
            assert self.embed is not None
            answers = self.embed([row[4] for row in chunk], [row[3] for row in chunk])
            made: dict[int, list[Embeddings]] = {}
            for row, answer in zip(chunk, answers, strict=True):
                if isinstance(answer, BadRecord):
                    self.counts.refused_vectors += len(row[4].items)
                    continue
                self.counts.vectors += len(answer.items)
                made.setdefault(row[2], []).append(answer)
            for partition, vectors in made.items():
                self._next_embedding[partition] += len(vectors)
                self.serves[partition].embeddings(vectors, self._next_embedding[partition])
                self.speculates[partition].heads(vectors, self._next_embedding[partition])


def _chunks(
    due: list[tuple[int, int, int, int, FmRequest]], pairs_max: int
) -> Iterator[list[tuple[int, int, int, int, FmRequest]]]:
    """Runs of requests with at most `pairs_max` pairs together, at least one request each."""
    chunk: list[tuple[int, int, int, int, FmRequest]] = []
    pairs = 0
    for row in due:
        if chunk and pairs + len(row[4].items) > pairs_max:
            yield chunk
            chunk, pairs = [], 0
        chunk.append(row)
        pairs += len(row[4].items)
    if chunk:
        yield chunk

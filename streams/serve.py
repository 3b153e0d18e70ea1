"""Serve: one partition's folds of events and embeddings, and its answers to ranking requests.

In: batches of events, embeddings and requests with the next offset of their topic. Out: one `RankedResult` a request, in order.
Never: awaits, reads a clock, or lets one request's company change its bytes. Whether a request is late, and whether state is still
being restored, is decided by the caller, so that a replay can honour what was decided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from models.ranker import RankerLike
from schemas.errors import ConfigError
from schemas.events import EventBatch
from schemas.inference import HISTORY_MAX, Embeddings
from schemas.ranking import TIERS, Basis, CheckedRequest, RankedResult, decode_result, encode_result
from schemas.topics import EMBEDDINGS, EVENTS
from streams.aggregate import Aggregate
from streams.answers import Answers
from streams.cache import Cache
from streams.clock import PartitionClock
from streams.counters import ItemCounters
from streams.history import ROWS_MAX, History
from streams.items import ItemIndex
from streams.neighbors import Cut, Generation, Neighbors, NeighborsConfig
from streams.rank import Columns, fallback, ranked
from streams.score import Scored, Scorer, Tables
from streams.state.prune import Pruner
from streams.state.store import FoldCounts, Store, Transaction

_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`ttl_ms` 0 = no exact vectors. A generation of neighbours is due every `generation_records` embeddings records (0 = never).

    `answers_bytes_max` is what one partition may keep of the last `answers_window_ms` (event time) for repeated requests.
    """

    ttl_ms: int = 4 * _HOUR_MS
    pane_ms: int = 600_000
    window_ms: int = 24 * _HOUR_MS
    history_rows_max: int = 100
    shown_rows_max: int = 64
    shadow: bool = False
    neighbors_k: int = 10
    neighbors_exact_users_max: int = 20_000
    neighbors_seed: int = 7
    generation_records: int = 2_000
    answers_window_ms: int = 600_000
    answers_bytes_max: int = 256 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.history_rows_max <= HISTORY_MAX:
            raise ValueError(
                f"history_rows_max is {self.history_rows_max}; an fm-request holds 1 to {HISTORY_MAX} rows"
            )
        if not 1 <= self.shown_rows_max <= ROWS_MAX:
            raise ValueError(f"shown_rows_max is {self.shown_rows_max}; a row of impressions holds 1 to {ROWS_MAX}")
        if self.pane_ms < 1 or self.window_ms < 1 or self.window_ms % self.pane_ms:
            raise ValueError(f"window_ms is {self.window_ms}, which is not whole panes of pane_ms = {self.pane_ms}")

    def hash(self) -> str:
        """16 hex digits that every result names."""
        return hashlib.blake2b(msgspec.json.encode(asdict(self)), digest_size=8).hexdigest()


Observer = Callable[[Sequence[CheckedRequest], Scored], None]
"""Sees what each batch of new requests was scored on: how training rows and reports are made. It must not change anything."""


class Serve:
    """`space` and `dimensions` are those that `ranker` was trained on; `base` is the ranker without vectors, for `shadow`."""

    def __init__(
        self,
        partition: int,
        bundle_hash: str,
        ranker: RankerLike,
        base: RankerLike | None,
        space: int,
        dimensions: int,
        config: ServeConfig,
        store: Store,
        items: ItemIndex,
    ) -> None:
        if config.shadow and base is None:
            raise ConfigError(
                "[serve] shadow = true, but the bundle has no base ranker; train one or set shadow = false"
            )
        self.partition, self.space, self.config, self.store, self.index = partition, space, config, store, items
        self._bundle, self._config_hash = bundle_hash, config.hash()
        self.ranker, self._dimensions = ranker, dimensions
        self.tables = Tables(
            History("history", config.history_rows_max, impressions=False),
            History("shown", config.shown_rows_max, impressions=True),
            ItemCounters(items),
            Cache(config.ttl_ms, dimensions),
            Aggregate(dimensions, config.pane_ms, config.window_ms),
        )
        chosen = NeighborsConfig(config.neighbors_k, config.neighbors_exact_users_max, seed=config.neighbors_seed)
        self.neighbors = Neighbors(chosen, dimensions, config.window_ms)
        self._scorer = Scorer(self.tables, ranker, base if config.shadow else None, space, items, self.neighbors)
        self.observer: Observer | None = None
        self.clock = PartitionClock.load(store)
        self.answers = Answers(config.answers_bytes_max, config.answers_window_ms)
        self.items_applied = 0
        """Next offsets of the catalogue that `items` has applied, summed over its partitions; the caller keeps it."""
        self._pruner = Pruner(self.tables.rules())
        known = store.stamp(EMBEDDINGS.name) is not None  # after a restart the rows are there, and no neighbours yet
        self._records_since_cut = config.generation_records if known else 0
        self._counts = dict.fromkeys(_COUNTERS, 0)

    def events(self, batch: EventBatch, next_offset: int, origins: Mapping[str, int] | None = None) -> None:
        """Fold events: histories, impressions, counters, the clock; one commit with the stamp, and the stamps of `origins`."""
        txn = Transaction(self.store)
        self._pruner.step(self.store, txn, self.clock.now)
        history = self.tables.history.fold(batch, txn) + self.tables.shown.fold(batch, txn)
        self.tables.counters.fold(batch, txn)
        clock = PartitionClock(self.clock.now)
        clock.advance(batch.ts)
        clock.save(txn)
        for name, offset in (origins or {}).items():
            txn.stamp(name, offset)
        txn.stamp(EVENTS.name, next_offset)
        self.store.commit(txn)
        self.clock = clock
        self._count("events", history)

    def embeddings(self, batch: Sequence[Embeddings], next_offset: int) -> None:
        """Fold vectors: pairs and user panes; one commit with the stamp. Of this space only those of `dimensions` numbers."""
        fitting = [m for m in batch if m.space != self.space or m.codes.shape[1] == self._dimensions]
        txn = Transaction(self.store)
        counts, accepted = self.tables.cache.fold(fitting, txn)
        self.tables.aggregate.fold(fitting, accepted, txn)
        txn.stamp(EMBEDDINGS.name, next_offset)
        self.store.commit(txn)
        self._records_since_cut += len(batch)
        self._counts["embeddings_dimensions"] += len(batch) - len(fitting)
        self._count("vectors", counts)

    def rank(
        self, requests: Sequence[CheckedRequest], late: Sequence[bool] | None = None, degraded: bool = False
    ) -> list[RankedResult]:
        """One result a request; `late` ones get the fallback order, known ones what they got before."""
        return [result or decode_result(data) for result, data in self._answered(requests, late, degraded)]

    def answer(
        self, requests: Sequence[CheckedRequest], late: Sequence[bool] | None = None, degraded: bool = False
    ) -> list[bytes]:
        """`rank` as the bytes for the topic; a repeated request gets the very bytes that were sent."""
        return [data for _, data in self._answered(requests, late, degraded)]

    def remember(self, results: Iterable[bytes]) -> None:
        """Results read back from ranked-results, in offset order, so that repeats of their requests are known."""
        self.answers.remember((decode_result(data), data) for data in results)

    def expect(self, results: Iterable[bytes], offset_below: int) -> None:
        """Results read back that may answer requests which come again after a crash, those below this offset; in offset order."""
        self.answers.expect(((decode_result(data), data) for data in results), offset_below)

    def cut_due(self) -> bool:
        """Whether enough embeddings records were folded since the last cut."""
        return 0 < self.config.generation_records <= self._records_since_cut

    def cut(self) -> Cut:
        """Begin a generation of neighbours from the rows as they are now; see `streams.neighbors` for how it goes on."""
        self._records_since_cut = 0
        name = (self._stamp(EVENTS.name), self._stamp(EMBEDDINGS.name))
        return Cut(
            self.neighbors.config,
            self.store,
            name,
            self.clock.now,
            self.tables.history,
            self.tables.aggregate,
            self.space,
        )

    def generation(self) -> Generation:
        """A whole generation at once, for replay and tests."""
        cut = self.cut()
        while cut.step(self.ranker, self.index):
            pass
        return cut.finish()

    def step(self, cut: Cut) -> bool:
        """Read some more users into `cut`, between batches; False when it can be finished."""
        return cut.step(self.ranker, self.index)

    def install(self, generation: Generation | None) -> bool:
        """Use this generation from the next request on; False where it is refused (torn, or older)."""
        return self.neighbors.install(generation)

    def stats(self) -> dict[str, int]:
        """Counts since the start, and sizes now."""
        generation = self.neighbors.generation
        return {
            **self._counts,
            "answers": len(self.answers),
            "answers_bytes": self.answers.bytes,
            "answers_forgotten_early": self.answers.forgotten_early,
            "neighbor_users": len(generation.keys) if generation else 0,
            "generations_refused": self.neighbors.refused,
            "clock_ms": self.clock.now,
        }

    def _answered(
        self, requests: Sequence[CheckedRequest], late: Sequence[bool] | None, degraded: bool
    ) -> list[tuple[RankedResult | None, bytes]]:
        """Per request its bytes, and the result itself where it was made just now."""
        nows = [max(request.ts, self.clock.now) for request in requests]
        known = [self.answers.find(r.user, r.request_id, now, r.offset) for r, now in zip(requests, nows, strict=True)]
        first: dict[tuple[str, str], int] = {}  # of each request that has no answer yet
        for at, request in enumerate(requests):
            if known[at] is None:
                first.setdefault((request.user, request.request_id), at)
        flags = ("degraded",) if degraded else ()
        made: dict[int, tuple[RankedResult, bytes]] = {}
        for place, result in self._make(requests, nows, list(first.values()), late, flags):
            made[place] = (result, encode_result(result))
        for place in first.values():
            self.answers.keep(*made[place])
        self._counts["requests"] += len(requests)
        self._counts["repeated"] += len(requests) - len(made)
        return [
            made.get(at) or (None, known[at] or made[first[(request.user, request.request_id)]][1])
            for at, request in enumerate(requests)
        ]

    def _make(
        self,
        requests: Sequence[CheckedRequest],
        nows: Sequence[int],
        places: Sequence[int],
        late: Sequence[bool] | None,
        flags: Sequence[str],
    ) -> Iterator[tuple[int, RankedResult]]:
        """Results of the requests at `places`, in no order: the late ones by popularity, the rest by the ranker."""
        for answers, behind in ((self._fallbacks, True), (self._scored, False)):
            group = [at for at in places if bool(late is not None and late[at]) is behind]
            results = answers([requests[at] for at in group], [nows[at] for at in group], flags)
            yield from zip(group, results, strict=True)

    def _fallbacks(
        self, requests: Sequence[CheckedRequest], nows: Sequence[int], flags: Sequence[str]
    ) -> Iterator[RankedResult]:
        for request, now in zip(requests, nows, strict=True):
            counts = self._scorer.popularity(self.store, request, now)
            self._counts["late"] += 1
            yield fallback(request, now, counts, self._basis(request), flags)

    def _scored(
        self, requests: Sequence[CheckedRequest], nows: Sequence[int], flags: Sequence[str]
    ) -> Iterator[RankedResult]:
        bases = [self._basis(request) for request in requests]
        full = [at for at, request in enumerate(requests) if request.candidates]
        columns: Columns = (np.zeros(0), None, np.zeros(0, np.uint8), np.zeros(0, np.int64))
        if full:
            asked = [requests[at] for at in full]
            scored = self._scorer.score(self.store, asked, [nows[at] for at in full])
            if self.observer is not None:
                self.observer(asked, scored)
            self._tally(scored)
            columns = (scored.scores, scored.shadow, scored.found.tier, scored.found.age_ms)
        yield from ranked(requests, nows, *columns, bases, flags)

    def _basis(self, request: CheckedRequest) -> Basis:
        return Basis(
            self.partition, request.offset, self._stamp(EVENTS.name), self._stamp(EMBEDDINGS.name), self.items_applied,
            self._bundle, self._config_hash, self.neighbors.name,
        )  # fmt: skip

    def _stamp(self, topic: str) -> int:
        return self.store.stamp(topic) or 0

    def _tally(self, scored: Scored) -> None:
        for name, count in zip(TIERS, np.bincount(scored.found.tier, minlength=len(TIERS)).tolist(), strict=True):
            self._counts[f"tier_{name}"] += count
        self._counts["bad_scores"] += len(scored.scores) - int(np.isfinite(scored.scores).sum())

    def _count(self, kind: str, counts: FoldCounts) -> None:
        self._counts[f"{kind}_accepted"] += counts.accepted
        self._counts[f"{kind}_duplicate"] += counts.duplicate
        self._counts[f"{kind}_late"] += counts.late


_COUNTERS = (
    "requests", "repeated", "late", "bad_scores", "embeddings_dimensions",
    *(f"tier_{tier}" for tier in TIERS),
    *(f"{kind}_{fate}" for kind in ("events", "vectors") for fate in ("accepted", "duplicate", "late")),
)  # fmt: skip

"""Speculation for one partition: its three inputs, its clock, and one commit for everything that a batch changed.

In: event batches (folded, and answered with requests), ranked results (demand), heads of embeddings (what is fresh). Out: FM
requests, each with its user's history as of the partition's clock. Never: reads a vector or a clock, or promises the same
requests for another interleaving of its inputs; the tables it folds are a function of the events alone.

    events ─ fold ─┐
    results ───────┴─ requests for users who did something (streams.issue) ─ what is remembered (streams.memory) ─ commit
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from models.priors import Priors
from models.ranker import RankerLike
from schemas.events import IMPRESSION_CODE, EventBatch
from schemas.inference import Embeddings, FmRequest
from schemas.keys import hash64
from schemas.ranking import RankedResult
from schemas.topics import EMBEDDINGS, EVENTS, RANKED_RESULTS
from streams.asked import FEATURES, Asked
from streams.clock import PartitionClock
from streams.counters import ItemCounters
from streams.history import History
from streams.issue import Issuer, Missed, Moment, Tables
from streams.items import ItemIndex
from streams.ledger import Ledger
from streams.memory import Memory
from streams.outcomes import Outcomes
from streams.pairs import U64, pair_keys
from streams.predict import PredictConfig, Predictor
from streams.sources import HOUR_MS, I64, ItemTable
from streams.state.prune import Pruner, Rules
from streams.state.store import Store, Transaction
from streams.verify import Verifier, VerifyConfig
from streams.warm import make_priors, take_priors

_LEARN_ROWS = 4_096
_LABELS_MIN = 512
_NOBODY: Missed = (np.zeros(0, np.int64), np.zeros(0, np.int32))


@dataclass(frozen=True)
class SpeculateConfig:
    """What the parts share; `ttl_ms` and the histories' lengths are those of serve."""

    ttl_ms: int = 4 * HOUR_MS
    history_rows_max: int = 100
    shown_rows_max: int = 64
    seed: int = 7
    predict: PredictConfig = field(default_factory=PredictConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)


class Speculate:
    """One partition. `partitions` says how many share the budget; `space` is the embedding space that serve reads."""

    def __init__(
        self,
        partition: int,
        ranker: RankerLike,
        priors: Priors | None,
        space: int,
        config: SpeculateConfig,
        store: Store,
        items: ItemIndex,
        partitions: int,
    ) -> None:
        predict, verify = config.predict, config.verify
        self.partition, self.space, self.config, self.store = partition, space, config, store
        self._tables = Tables(
            History("history", config.history_rows_max, impressions=False),
            History("shown", config.shown_rows_max, impressions=True),
            ItemCounters(items),
            items,
        )
        self._pruner = Pruner(self.rules())
        self.clock = PartitionClock.load(store)
        table = ItemTable(items, predict.items_max, predict.popular_max, predict.category_max)
        self.predictor = Predictor(predict, table, ranker, config.seed)
        self.asked = Asked(predict.half_life_labels)
        self.outcomes = Outcomes(
            predict.samples_max, predict.sample_rate, config.ttl_ms, predict.label_grace_ms, len(FEATURES), config.seed,
            _LABELS_MIN,
        )  # fmt: skip
        inflight_ms = verify.deadline_ms + verify.grace_ms
        self.ledger = Ledger(verify.ledger_rows_max, config.ttl_ms, verify.refresh_ms, inflight_ms)
        self.verifier = Verifier(verify, 1.0 / partitions)
        self._memory = Memory(space, self.predictor, self.asked, self.outcomes, self.ledger, self.verifier.price)
        items_known, weights_known = self._memory.load(store)
        if not weights_known and priors is not None and priors.asked:
            self.asked.load(priors.asked, counts=False)
        self._priors = None if items_known else priors
        self._issuer = Issuer(
            space, ranker, self._tables, self.predictor, self.asked, self.outcomes, self.ledger, self.verifier
        )
        self._counts: Counter[str] = self._issuer.counts

    def rules(self) -> Rules:
        """Which rows are live: of every table that this folds."""
        folds = (self._tables.history, self._tables.shown, self._tables.counters)
        return {table: rule for fold in folds for table, rule in fold.rules().items()}

    def events(
        self, batch: EventBatch, next_offset: int, answer_from: int = 0, origins: Mapping[str, int] | None = None
    ) -> list[FmRequest]:
        """Fold what is at or past the stamp, then predict for the users of events at or past `answer_from`. One commit, with the
        stamps of `origins` beside that of the topic."""
        stamp = self.store.stamp(EVENTS.name) or 0
        fresh = _from_offset(batch, stamp)
        txn = Transaction(self.store)
        self._pruner.step(self.store, txn, self.clock.now)
        self._fold(fresh, txn)
        for name, offset in (origins or {}).items():
            txn.stamp(name, offset)
        txn.stamp(EVENTS.name, max(next_offset, stamp))
        now = self._begin(fresh.ts, 0)
        if self._memory.learned_from is None:
            self._memory.learned_from = int(fresh.offsets[0]) if len(fresh) else next_offset
        active = np.flatnonzero(fresh.types != IMPRESSION_CODE)
        if len(active):
            names = [fresh.items[at] for at in active.tolist()]
            self.predictor.table.touch(self.predictor.table.intern(names, now), fresh.ts[active])
        answered = np.flatnonzero((batch.types != IMPRESSION_CODE) & (batch.offsets >= answer_from)).tolist()
        users = list(dict.fromkeys(batch.users[at] for at in answered))
        requests = self._requests(users, _hashes(users), _NOBODY, txn)
        self._commit(txn)
        return requests

    def results(
        self, results: Sequence[RankedResult], next_offset: int, new: int | None = None, answered: int | None = None
    ) -> list[FmRequest]:
        """Demand: outcomes of earlier forecasts, missed pairs as candidates, and a trigger for the results' users.

        `new`: only so many, the last ones, are at or past the stamp: the others were counted before. `answered`: only so many, the
        last ones, are answered with requests. None: all.
        """
        fresh = results if new is None else results[len(results) - new :]
        asking = results if answered is None else results[len(results) - answered :]
        sizes = [len(result.items) for result in fresh]
        ts = np.array([result.ts for result in fresh], np.int64)
        txn = Transaction(self.store)
        txn.stamp(RANKED_RESULTS.name, max(next_offset, self.store.stamp(RANKED_RESULTS.name) or 0))
        now = self._begin(ts, sum(sizes))
        self._counts["results"] += len(fresh)
        self._counts["ranked"] += sum(sizes)
        if sum(sizes):
            self._demand(fresh, np.repeat(ts, sizes), now)
        users = list(dict.fromkeys(result.user_id for result in asking))
        requests = self._requests(users, _hashes(users), self._missed(asking, users, now), txn)
        self._commit(txn)
        return requests

    def heads(self, embeddings: Sequence[Embeddings], next_offset: int) -> None:
        """What the FM has answered; only ids, `as_of` and space are looked at. Seen twice it changes nothing."""
        mine = [message for message in embeddings if message.space == self.space and message.items]
        sizes = [len(message.items) for message in mine]
        users = np.repeat(_hashes([message.user for message in mine]), sizes)
        items = self.predictor.table.hashes(list(chain.from_iterable(message.items for message in mine)))
        as_of = np.repeat(np.array([message.as_of for message in mine], np.int64), sizes)
        self.ledger.embedded(pair_keys(users, items), as_of)
        self._counts["embedded"] += len(items)
        self._counts["other_space"] += len(embeddings) - len(mine)
        self._counts["embeddings_offset"] = next_offset
        txn = Transaction(self.store)
        txn.stamp(EMBEDDINGS.name, max(next_offset, self.store.stamp(EMBEDDINGS.name) or 0))
        self._commit(txn)

    def priors(self, items_max: int = 50_000) -> Priors:
        """What was learned, for a bundle."""
        return make_priors(self.predictor, self.asked, self.clock.now, items_max)

    def stats(self) -> dict[str, Any]:
        """Counts, drop reasons, price and budget, P(asked)'s reliability table; JSON-able. Counts are since the opening."""
        price = self.verifier.price
        return {
            **self._counts,
            "admitted": self.verifier.admitted,
            "dropped": dict(self.verifier.dropped),
            "price": price.price,
            "budget": {"earned": price.earned, "spent": price.spent, "lost": price.lost, "credit": price.credit}
            if not price.unlimited
            else None,
            "asked": {
                "labels": self.asked.labels,
                "pending": len(self.outcomes),
                "sample_rate": self.outcomes.rate,
                "calibration_error": self.asked.calibration_error(),
                "reliability": self.asked.reliability(),
            },
            "items": len(self.predictor.table),
            "similar_items": self.predictor.similar.items,
            "ledger": {"pairs": len(self.ledger), "evicted": self.ledger.evicted},
        }

    def _fold(self, fresh: EventBatch, txn: Transaction) -> None:
        self._counts["events"] += len(fresh)
        self._counts["late_history"] += self._tables.history.fold(fresh, txn).late
        self._counts["late_shown"] += self._tables.shown.fold(fresh, txn).late
        self._tables.counters.fold(fresh, txn)

    def _begin(self, ts: I64, ranked: int) -> int:
        """Advance the clock, and with it everything that waits for it: labels, budget, sweeps, priors."""
        now = self.clock.advance(ts)
        if self._priors is not None and now:
            take_priors(self._priors, self.predictor, now)
            self._priors = None
        rows, asked, predicted = self.outcomes.ripe(now)
        for start in range(0, len(rows), _LEARN_ROWS):
            part = slice(start, start + _LEARN_ROWS)
            self.asked.learn(rows[part], asked[part], predicted[part])
        self.verifier.price.earn(now, ranked)
        self.predictor.begin(now)
        return now

    def _requests(self, users: list[str], hashes: U64, missed: Missed, txn: Transaction) -> list[FmRequest]:
        """The requests of these users, on what the transaction has reached."""
        offsets = [txn.stamps.get(topic.name, self.store.stamp(topic.name)) for topic in (EVENTS, RANKED_RESULTS)]
        moment = Moment(self.clock.now, offsets[0] or 0, -1 if offsets[1] is None else offsets[1])
        return self._issuer.requests(users, hashes, missed, self._memory.learned_from or 0, moment, txn)

    def _commit(self, txn: Transaction) -> None:
        self.clock.save(txn)
        self._memory.save(txn)
        self.store.commit(txn)

    def _demand(self, results: Sequence[RankedResult], ts: I64, now: int) -> None:
        """Count every ranked pair, `ts` [pairs] when it was."""
        users, owner = _owners(results)
        slots = self.predictor.table.intern([item.item_id for result in results for item in result.items], now)
        self.outcomes.asked(self.predictor.demand(_hashes(users), owner, slots, ts), ts)

    def _missed(self, results: Sequence[RankedResult], users: list[str], now: int) -> Missed:
        """The pairs that no exact vector served and that may be asked of the FM."""
        place = {user: at for at, user in enumerate(users)}
        missed = [
            (place[result.user_id], item.item_id)
            for result in results
            if "degraded" not in result.flags
            for item in result.items
            if item.tier != "exact"
        ]
        self._counts["missed"] += len(missed)
        slots = self.predictor.table.intern([item for _, item in missed], now)
        return np.array([owner for owner, _ in missed], np.int64), slots


def _owners(results: Sequence[RankedResult]) -> tuple[list[str], I64]:
    """The distinct users of results, and for each ranked pair its user's place among them."""
    users = list(dict.fromkeys(result.user_id for result in results))
    place = {user: at for at, user in enumerate(users)}
    return users, np.repeat([place[result.user_id] for result in results], [len(result.items) for result in results])


def _hashes(users: Sequence[str]) -> U64:
    return np.fromiter(map(hash64, users), np.uint64, len(users))


def _from_offset(batch: EventBatch, offset: int) -> EventBatch:
    """The rows of a batch at or past an offset."""
    if not len(batch) or int(batch.offsets[0]) >= offset:
        return batch
    return batch.take(np.flatnonzero(batch.offsets >= offset).tolist())

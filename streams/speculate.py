"""Speculation for one partition: from what users do, and from what was ranked, to the FM requests that are worth their price.

In: event batches (folded, and answered with requests), ranked results (demand), heads of embeddings (what is fresh). Out: FM
requests, each with its user's history as of the partition's clock. Never: reads a vector or a clock, or promises the same
requests for another interleaving of its inputs; the tables it folds are a function of the events alone.

    events ─ fold ─┐
    results ───────┴─ predict (candidates) ─ P(asked) ─ verify (ledger, ranker, price) ─ requests
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
from schemas.inference import SOURCES, Embeddings, FmRequest
from schemas.keys import hash64
from schemas.ranking import RankedResult
from schemas.topics import EVENTS
from streams.asked import FEATURES, ITEM_COLUMNS, PAIR_COLUMNS, USER_COLUMNS, Asked
from streams.candidates import Candidates
from streams.clock import PartitionClock
from streams.counters import ItemCounters
from streams.features import build_features
from streams.history import History, HistoryRow
from streams.items import ItemIndex
from streams.ledger import Ledger
from streams.outcomes import Outcomes
from streams.pairs import U64, pair_keys
from streams.predict import PredictConfig, Predictor
from streams.sources import F64, HOUR_MS, I32, I64, ItemTable
from streams.state.prune import Pruner, Rules
from streams.state.store import Store, Transaction
from streams.verify import Verifier, VerifyConfig
from streams.warm import load_asked, make_priors, save_asked, take_priors

_FIRST_SOURCE = np.array([0, *((mask & -mask).bit_length() - 1 for mask in range(1, 1 << len(SOURCES)))], np.uint8)
_SAVE_LABELS = 2_000
_LEARN_ROWS = 4_096


@dataclass(frozen=True)
class SpeculateConfig:
    """What the parts share; `ttl_ms` and the histories' lengths are those of serve."""

    ttl_ms: int = 4 * HOUR_MS
    history_rows_max: int = 100
    shown_rows_max: int = 64
    seed: int = 7
    predict: PredictConfig = field(default_factory=PredictConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)


@dataclass(frozen=True, slots=True)
class _Users:
    """Users at work in one call, with their hashes and both histories."""

    names: list[str]
    hash: U64
    histories: list[HistoryRow]
    shown: list[HistoryRow]


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
        self.partition, self.space, self.config, self.store, self.index = partition, space, config, store, items
        self._ranker, self._priors = ranker, priors
        self._history = History("history", config.history_rows_max, impressions=False)
        self._shown = History("shown", config.shown_rows_max, impressions=True)
        self._counters = ItemCounters(items)
        self._pruner = Pruner(self.rules())
        self.clock = PartitionClock.load(store)
        table = ItemTable(items, predict.items_max, predict.popular_max, predict.category_max)
        self.predictor = Predictor(predict, table, ranker, config.seed)
        self.asked = Asked(predict.half_life_labels)
        if not load_asked(self.asked, store) and priors is not None and priors.asked:
            self.asked.load(priors.asked, counts=False)
        self.outcomes = Outcomes(
            predict.samples_max, predict.sample_rate, config.ttl_ms, predict.label_grace_ms, len(FEATURES), config.seed
        )
        inflight_ms = verify.deadline_ms + verify.grace_ms
        self.ledger = Ledger(verify.ledger_rows_max, config.ttl_ms, verify.refresh_ms, inflight_ms, space)
        self.ledger.load(store)
        self.verifier = Verifier(verify, 1.0 / partitions)
        self._learned_from: int | None = None  # first offset whose co-visits are ours to learn
        self._results_offset = -1
        self._saved_labels = self.asked.labels
        self._counts: Counter[str] = Counter()

    def rules(self) -> Rules:
        """Which rows are live: of every table that this folds."""
        folds = (self._history, self._shown, self._counters)
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
        self._counts["events"] += len(fresh)
        for name, fold in (("late_history", self._history), ("late_shown", self._shown)):
            self._counts[name] += fold.fold(fresh, txn).late
        self._counters.fold(fresh, txn)
        for name, offset in (origins or {}).items():
            txn.stamp(name, offset)
        txn.stamp(EVENTS.name, max(next_offset, stamp))
        now = self._begin(fresh.ts, 0)
        if self._learned_from is None:
            self._learned_from = int(fresh.offsets[0]) if len(fresh) else next_offset
        active = np.flatnonzero(fresh.types != IMPRESSION_CODE)
        if len(active):
            names = [fresh.items[at] for at in active.tolist()]
            self.predictor.table.touch(self.predictor.table.intern(names, now), fresh.ts[active])
        answered = np.flatnonzero((batch.types != IMPRESSION_CODE) & (batch.offsets >= answer_from)).tolist()
        users = list(dict.fromkeys(batch.users[at] for at in answered))
        nobody = np.zeros(0, np.int64), np.zeros(0, np.int32)
        requests = self._predict(users, _hashes(users), nobody, txn, max(next_offset, stamp))
        self._commit(txn, now)
        return requests

    def results(self, results: Sequence[RankedResult], next_offset: int) -> list[FmRequest]:
        """Demand: outcomes of earlier forecasts, missed pairs as candidates, and a trigger for the results' users."""
        self._results_offset = max(self._results_offset, next_offset)
        sizes = [len(result.items) for result in results]
        ts = np.array([result.ts for result in results], np.int64)
        now = self._begin(ts, sum(sizes))
        self._counts["results"] += len(results)
        self._counts["ranked"] += sum(sizes)
        users = list(dict.fromkeys(result.user_id for result in results))
        hashes, missed = _hashes(users), (np.zeros(0, np.int64), np.zeros(0, np.int32))
        if sum(sizes):
            missed = self._demand(results, users, hashes, np.repeat(ts, sizes), now)
        txn = Transaction(self.store)
        requests = self._predict(users, hashes, missed, txn, self.store.stamp(EVENTS.name) or 0)
        self._commit(txn, now)
        return requests

    def heads(self, embeddings: Sequence[Embeddings], next_offset: int) -> None:
        """What the FM has answered; only ids, `as_of` and space are looked at."""
        mine = [message for message in embeddings if message.space == self.space and message.items]
        sizes = [len(message.items) for message in mine]
        users = np.repeat(_hashes([message.user for message in mine]), sizes)
        items = self.predictor.table.hashes(list(chain.from_iterable(message.items for message in mine)))
        as_of = np.repeat(np.array([message.as_of for message in mine], np.int64), sizes)
        txn = Transaction(self.store)
        self.ledger.embedded(pair_keys(users, items), as_of, txn)
        self._counts["embedded"] += len(items)
        self._counts["other_space"] += len(embeddings) - len(mine)
        self._counts["embeddings_offset"] = next_offset
        self._commit(txn, self.clock.now)

    def priors(self, items_max: int = 50_000) -> Priors:
        """What was learned, for a bundle."""
        return make_priors(self.predictor, self.asked, self.clock.now, items_max)

    def stats(self) -> dict[str, Any]:
        """Counts, drop reasons, price and budget, P(asked)'s reliability table; JSON-able."""
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

    def _commit(self, txn: Transaction, now: int) -> None:
        self.ledger.prune(now, txn)
        self.clock.save(txn)
        if self.asked.labels - self._saved_labels >= _SAVE_LABELS:
            save_asked(self.asked, txn)
            self._saved_labels = self.asked.labels
        self.store.commit(txn)

    def _demand(
        self, results: Sequence[RankedResult], users: list[str], hashes: U64, ts: I64, now: int
    ) -> tuple[I64, I32]:
        """Count every ranked pair; returns (owner, slot) of those that missed and may be asked of the FM."""
        place = {user: at for at, user in enumerate(users)}
        owner = np.repeat([place[result.user_id] for result in results], [len(result.items) for result in results])
        slots = self.predictor.table.intern([item.item_id for result in results for item in result.items], now)
        self.outcomes.asked(self.predictor.demand(hashes, owner, slots, ts), ts)
        missed = np.array(
            [item.tier != "exact" and "degraded" not in result.flags for result in results for item in result.items]
        )
        self._counts["missed"] += int(missed.sum())
        return owner[missed], slots[missed]

    def _predict(
        self, users: list[str], hashes: U64, missed: tuple[I64, I32], txn: Transaction, events_offset: int
    ) -> list[FmRequest]:
        """Candidates of these users, their forecasts, the verdict, and the requests for what was admitted."""
        now = self.clock.now
        full = self.predictor.due(hashes, now)
        busy = full.copy()
        if self.predictor.has("reactive"):
            busy[missed[0]] = True
        chosen = np.flatnonzero(busy)
        if not len(chosen):
            return []
        names = [users[at] for at in chosen.tolist()]
        at = _Users(names, hashes[chosen], self._history.read(txn, names), self._shown.read(txn, names))
        missed = np.searchsorted(chosen, missed[0]), missed[1]
        past, shown = self.predictor.join(at.histories, now), self.predictor.join(at.shown, now)
        self.predictor.learn(past, at.hash, self._learned_from or 0)
        found = self.predictor.candidates(at.hash, past, shown, full[chosen], missed, now)
        p_asked = self._forecast(found, now)
        self._counts["predictions"] += int(full.sum())
        self._counts["candidates"] += len(found)
        short = self.verifier.shortlist(found.owner, p_asked, *self.ledger.states(found.key, now))
        if not len(short):
            return []
        values = self.verifier.values(p_asked[short], self._score(at, found.owner[short], found.slot[short], txn))
        bought = self.verifier.admit(found.owner[short], values)
        if not len(bought):
            return []
        return self._requests(at, found, short[bought], p_asked[short[bought]], values[bought], txn, events_offset)

    def _forecast(self, found: Candidates, now: int) -> F64:
        """P(asked) of each candidate; a sample of them waits for its outcome."""
        weights, items = self.asked.weights, self.predictor.table.features
        by_item = items[: len(self.predictor.table)] @ weights[ITEM_COLUMNS]
        logits = found.pair @ weights[PAIR_COLUMNS].astype(np.float32)
        logits = logits + by_item[found.slot] + (found.user @ weights[USER_COLUMNS])[found.owner]
        p_asked = self.asked.calibrated(logits)
        sample = self.outcomes.choose(found.key, now)
        parts = found.user[found.owner[sample]], items[found.slot[sample]], found.pair[sample]
        self.outcomes.add(found.key[sample], now, np.concatenate(parts, axis=1), p_asked[sample].astype(np.float32))
        return p_asked

    def _score(self, at: _Users, owner: I64, slot: I32, txn: Transaction) -> F64:
        """The ranker's probability of each pair, without any vector, float64 [n]; pairs are ascending by owner."""
        self._counts["scored"] += len(owner)
        chosen, request = np.unique(owner, return_inverse=True)
        users = [at.names[place] for place in chosen.tolist()]
        rows = self.predictor.table.rows(slot)
        now = np.full(len(users), self.clock.now, np.int64)
        features = build_features(
            users,
            [at.histories[place] for place in chosen.tolist()],
            [at.shown[place] for place in chosen.tolist()],
            now,
            request.astype(np.int32),
            rows,
            self.index,
            self._counters.read(txn, rows, self.clock.now),
            self._counters.read_users(txn, users, now),
        )
        return self._ranker.score_many(features, None)

    def _requests(
        self,
        at: _Users,
        found: Candidates,
        bought: I64,
        p_asked: F64,
        values: F64,
        txn: Transaction,
        events_offset: int,
    ) -> list[FmRequest]:
        """One request a user, items by value; issued in the ledger."""
        order = np.lexsort((found.slot[bought], -values, found.owner[bought]))
        bought, p32, v32 = bought[order], p_asked[order].astype(np.float32), values[order].astype(np.float32)
        self.ledger.issue(found.key[bought], self.clock.now, txn)
        owners, starts = np.unique(found.owner[bought], return_index=True)
        names, now, requests = self.predictor.table.names, self.clock.now, []
        for owner, start, end in zip(
            owners.tolist(), starts.tolist(), [*starts.tolist()[1:], len(bought)], strict=True
        ):
            part, history = bought[start:end], at.histories[owner]
            requests.append(
                FmRequest(
                    at.names[owner], self.space, now, self.config.verify.deadline_ms, events_offset, self._results_offset,
                    [names[slot] for slot in found.slot[part].tolist()], p32[start:end], v32[start:end],
                    _FIRST_SOURCE[found.sources[part]], history.items, history.types, history.ts,
                )
            )  # fmt: skip
        self._counts["requests"] += len(requests)
        return requests


def _hashes(users: Sequence[str]) -> U64:
    return np.fromiter(map(hash64, users), np.uint64, len(users))


def _from_offset(batch: EventBatch, offset: int) -> EventBatch:
    """The rows of a batch at or past an offset."""
    if not len(batch) or int(batch.offsets[0]) >= offset:
        return batch
    return batch.take(np.flatnonzero(batch.offsets >= offset).tolist())

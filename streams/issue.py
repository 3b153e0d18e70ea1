"""From the users who just did something to the FM requests that are worth their price: predict, forecast, verify, issue.

In: users of one batch, the pairs of theirs that were ranked in vain, the partition's tables. Out: one FM request a user, with the
history as of the partition's clock; what is issued stands in the ledger. Never: reads a vector or a clock, or folds an event.

    candidates (predict) ─ P(asked) ─ fresh and in flight go (ledger) ─ ranker ─ price (verify) ─ requests
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from models.ranker import RankerLike
from schemas.inference import SOURCES, FmRequest
from streams.asked import ITEM_COLUMNS, PAIR_COLUMNS, USER_COLUMNS, Asked
from streams.candidates import Candidates
from streams.counters import ItemCounters
from streams.features import build_features
from streams.history import History, HistoryRow
from streams.items import ItemIndex
from streams.ledger import Ledger
from streams.outcomes import Outcomes
from streams.pairs import U64
from streams.predict import Predictor
from streams.snapshot import snapshot
from streams.sources import F64, I32, I64
from streams.state.store import Transaction
from streams.verify import Verifier

_FIRST_SOURCE = np.array([0, *((mask & -mask).bit_length() - 1 for mask in range(1, 1 << len(SOURCES)))], np.uint8)

Missed = tuple[I64, I32]
"""Pairs that were ranked in vain: place of the user among those of the batch, slot of the item."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When and on what requests are made: the partition's clock, and the next offsets of events and results."""

    now: int
    events_offset: int
    results_offset: int


@dataclass(frozen=True, slots=True)
class _Users:
    """Users at work in one call, with their hashes and both histories."""

    names: list[str]
    hash: U64
    histories: list[HistoryRow]
    shown: list[HistoryRow]


@dataclass(frozen=True)
class Tables:
    """The folds that are read here, and the item index."""

    history: History
    shown: History
    counters: ItemCounters
    index: ItemIndex


class Issuer:
    """One partition's way from users to requests; counts what happened in `counts`."""

    def __init__(
        self,
        space: int,
        ranker: RankerLike,
        tables: Tables,
        predictor: Predictor,
        asked: Asked,
        outcomes: Outcomes,
        ledger: Ledger,
        verifier: Verifier,
    ) -> None:
        self.space, self.tables, self.counts = space, tables, Counter[str]()
        self._ranker, self._predictor, self._asked = ranker, predictor, asked
        self._outcomes, self._ledger, self._verifier = outcomes, ledger, verifier

    def requests(
        self, users: list[str], hashes: U64, missed: Missed, learned_from: int, moment: Moment, txn: Transaction
    ) -> list[FmRequest]:
        """Candidates of these users, their forecasts, the verdict, and the requests for what was admitted.

        Co-visits are learned from history rows at or past offset `learned_from`.
        """
        now, predictor = moment.now, self._predictor
        full = predictor.due(hashes, now)
        busy = full.copy()
        if predictor.has("reactive"):
            busy[missed[0]] = True
        chosen = np.flatnonzero(busy)
        if not len(chosen):
            return []
        names, tables = [users[at] for at in chosen.tolist()], self.tables
        at = _Users(names, hashes[chosen], tables.history.read(txn, names), tables.shown.read(txn, names))
        missed = np.searchsorted(chosen, missed[0]), missed[1]
        past, shown = predictor.join(at.histories, now), predictor.join(at.shown, now)
        predictor.learn(past, at.hash, learned_from)
        found = predictor.candidates(at.hash, past, shown, full[chosen], missed, now)
        p_asked = self._forecast(found, now)
        self.counts["predictions"] += int(full.sum())
        self.counts["candidates"] += len(found)
        short = self._verifier.shortlist(found.owner, p_asked, *self._ledger.states(found.key, now))
        if not len(short):
            return []
        values = self._verifier.values(p_asked[short], self._score(at, found.owner[short], found.slot[short], now, txn))
        bought = self._verifier.admit(found.owner[short], values)
        if not len(bought):
            return []
        return self._issued(at, found, short[bought], p_asked[short[bought]], values[bought], moment)

    def _forecast(self, found: Candidates, now: int) -> F64:
        """P(asked) of each candidate; a sample of them waits for its outcome."""
        weights, table = self._asked.weights, self._predictor.table
        by_item = table.features[: len(table)] @ weights[ITEM_COLUMNS]
        logits = found.pair @ weights[PAIR_COLUMNS].astype(np.float32)
        logits = logits + by_item[found.slot] + (found.user @ weights[USER_COLUMNS])[found.owner]
        p_asked = self._asked.calibrated(logits)
        sample = self._outcomes.choose(found.key, now)
        parts = found.user[found.owner[sample]], table.features[found.slot[sample]], found.pair[sample]
        self._outcomes.add(found.key[sample], now, np.concatenate(parts, axis=1), p_asked[sample].astype(np.float32))
        return p_asked

    def _score(self, at: _Users, owner: I64, slot: I32, now: int, txn: Transaction) -> F64:
        """The ranker's probability of each pair, without any vector, float64 [n]; pairs are ascending by owner."""
        self.counts["scored"] += len(owner)
        chosen, request = np.unique(owner, return_inverse=True)
        users = [at.names[place] for place in chosen.tolist()]
        rows, tables = self._predictor.table.rows(slot), self.tables
        times = np.full(len(users), now, np.int64)
        features = build_features(
            users,
            [at.histories[place] for place in chosen.tolist()],
            [at.shown[place] for place in chosen.tolist()],
            times,
            request.astype(np.int32),
            rows,
            tables.index,
            tables.counters.read(txn, rows, now),
            tables.counters.read_users(txn, users, times),
        )
        return self._ranker.score_many(features, None)

    def _issued(
        self, at: _Users, found: Candidates, bought: I64, p_asked: F64, values: F64, moment: Moment
    ) -> list[FmRequest]:
        """One request a user, items by value; issued in the ledger."""
        order = np.lexsort((found.slot[bought], -values, found.owner[bought]))
        bought, p32, v32 = bought[order], p_asked[order].astype(np.float32), values[order].astype(np.float32)
        self._ledger.issue(found.key[bought], moment.now)
        owners, starts = np.unique(found.owner[bought], return_index=True)
        names, deadline_ms, requests = self._predictor.table.names, self._verifier.config.deadline_ms, []
        for owner, start, end in zip(
            owners.tolist(), starts.tolist(), [*starts.tolist()[1:], len(bought)], strict=True
        ):
            part, history = bought[start:end], snapshot(at.histories[owner], at.shown[owner])
            requests.append(
                FmRequest(
                    at.names[owner], self.space, moment.now, deadline_ms, moment.events_offset, moment.results_offset,
                    [names[slot] for slot in found.slot[part].tolist()], p32[start:end], v32[start:end],
                    _FIRST_SOURCE[found.sources[part]], history.items, history.types, history.ts,
                )
            )  # fmt: skip
        self.counts["requests"] += len(requests)
        return requests

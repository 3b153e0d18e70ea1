"""How long rows live: one rule a table, for pruning in small steps and for a hash that pruning can't change.

In: a store, and the partition's `now`. Out: deletions in a transaction; a hash over the live rows.
Never: changes an answer. A row goes only when no read at `now` or later could see it, nor any row that a later record builds on it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from streams.state.store import Row, Store, Transaction


@dataclass(frozen=True, slots=True)
class Rule:
    """`newest_ms(key, value)` is the event time that the row lives by, UTC ms.

    Live (can show in an answer) while `newest > now - live_ms`; removed once `newest <= now - keep_ms`, where keep_ms >= live_ms.
    """

    newest_ms: Callable[[bytes, bytes], int] | None
    live_ms: int = 0
    keep_ms: int = 0

    def live(self, key: bytes, value: bytes, now: int) -> bool:
        """Whether an answer at `now` may rest on the row."""
        return self.newest_ms is None or self.newest_ms(key, value) > now - self.live_ms

    def dead(self, key: bytes, value: bytes, now: int) -> bool:
        """Whether the row may go."""
        return self.newest_ms is not None and self.newest_ms(key, value) <= now - self.keep_ms


FOREVER = Rule(None)

Rules = Mapping[str, Rule]
"""Table → its rule. Each fold has a `rules()`; a store's are their union."""


class Pruner:
    """Walks the tables in a circle, a bounded number of rows at a time."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._circle = itertools.cycle([table for table, rule in rules.items() if rule.newest_ms is not None] or [None])
        self._table = next(self._circle)
        self._rows: Iterator[Row] | None = None

    def step(self, store: Store, txn: Transaction, now: int, rows_max: int = 256) -> int:
        """Look at up to `rows_max` committed rows and delete the dead ones in `txn`; returns how many.

        Begin the batch with it: what the batch then writes is written over the deletions. A round over a table reads one snapshot,
        so a row that looks dead there is looked at again as it is now.
        """
        if self._table is None:
            return 0
        if self._rows is None:
            self._rows = store.rows(self._table)
        rule, table = self._rules[self._table], self._table
        seen = list(itertools.islice(self._rows, rows_max))
        if len(seen) < rows_max:
            self._table, self._rows = next(self._circle), None
        suspects = [key for key, value in seen if rule.dead(key, value, now)]
        values = store.get(table, suspects) if suspects else []
        dead = [
            key for key, value in zip(suspects, values, strict=True) if value is not None and rule.dead(key, value, now)
        ]
        for key in dead:
            txn.delete(table, key)
        return len(dead)


def state_hash(store: Store, now: int, rules: Rules) -> str:
    """Hex digest of all rows live at `now` in the tables that have a rule, and of nothing else: equal folds, equal hashes."""
    digest = hashlib.blake2b(digest_size=16)
    for table in sorted(rules):
        digest.update(b"\x00table" + table.encode())
        for key, value in store.rows(table):
            if rules[table].live(key, value, now):
                digest.update(len(key).to_bytes(4) + key + len(value).to_bytes(4) + value)
    return digest.hexdigest()

"""What speculation remembers, kept with the rows of each batch: a restarted partition goes on as if it had never stopped.

In: the parts of one partition's speculation, and its store. Out: on opening, the parts as they were at the last commit; with each
commit, what changed. Never: anything that an answer depends on. A part that does not fit (other limits, other features) begins
anew, and what is left of it in the store goes with the next commit.

Kept are items with their counts, co-visits, users, demand, ledger, samples that wait, weights of P(asked), and the price. Not kept
is what follows from them: item features and candidate lists (made anew at the first batch), vectors of similar items (made anew up
to the same generation). docs/decisions/0004-memory.md says why it is done so, and what a restart can still be told by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.keys import prefixed
from streams.asked import Asked
from streams.ledger import Ledger
from streams.outcomes import Outcomes
from streams.predict import Predictor
from streams.state.store import Reader, Store, Transaction
from streams.verify import ShadowPrice

_SIZES, _WEIGHTS = prefixed(b"memory"), prefixed(b"asked")


class _Sizes(msgspec.Struct, frozen=True):
    """How much of each table counts, and the numbers that stand beside them."""

    space: int
    learned_from: int | None
    items: int
    epochs: tuple[int, int, int]
    similar: int
    covisits: int
    covisits_epoch: int
    users: int
    demand: int
    ledger: int
    outcomes: tuple[int, int, int]
    price: tuple[float, ...]


@dataclass
class Memory:
    """The parts that remember. `learned_from`: the first offset whose co-visits are this partition's to learn."""

    space: int
    predictor: Predictor
    asked: Asked
    outcomes: Outcomes
    ledger: Ledger
    price: ShadowPrice
    learned_from: int | None = None
    _saved_labels: int = 0
    _saved_epochs: tuple[int, int, int] = (0, 0, 0)

    def load(self, store: Store) -> tuple[bool, bool]:
        """Take what was kept; whether the items were (else they begin with priors), and whether the weights of P(asked)."""
        (value,) = store.get("soft", [_SIZES])
        try:
            sizes = None if value is None else msgspec.msgpack.decode(value, type=_Sizes)
        except msgspec.ValidationError:  # of another release
            sizes = None
        items = self._load_items(store, sizes)
        self.predictor.asked.load(store, None if sizes is None else sizes.demand)
        self.ledger.load(store, sizes.ledger if sizes is not None and sizes.space == self.space else None)
        self.outcomes.load(store, None if sizes is None else sizes.outcomes)
        self.price.load(store, None if sizes is None else sizes.price)
        return items, self._load_weights(store)

    def save(self, txn: Transaction) -> None:
        """Write what changed since the last time; the transaction must be committed."""
        table, covisits = self.predictor.table, self.predictor.covisits
        table.save(txn, self._saved_epochs)
        self._saved_epochs = table.epochs
        covisits.save(txn)
        for pairs in (self.predictor.users, self.predictor.asked, self.ledger):
            pairs.save(txn)
        sizes = _Sizes(
            self.space, self.learned_from, len(table), table.epochs, self.predictor.similar.items, len(covisits.totals),
            covisits.epoch, len(self.predictor.users), len(self.predictor.asked), len(self.ledger),
            self.outcomes.save(txn), self.price.save(txn),
        )  # fmt: skip
        txn.put("soft", _SIZES, msgspec.msgpack.encode(sizes))
        if self.asked.labels != self._saved_labels:
            arrays = {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in self.asked.export().items()}
            txn.put("soft", _WEIGHTS, msgspec.msgpack.encode(arrays))
            self._saved_labels = self.asked.labels

    def _load_items(self, store: Store, sizes: _Sizes | None) -> bool:
        """What is numbered by items' slots goes together; who was learned from says nothing without what was learned."""
        epochs = (0, 0, 0) if sizes is None else sizes.epochs
        known = self.predictor.table.load(store, None if sizes is None else sizes.items, epochs)
        sizes = sizes if known else None
        self.predictor.covisits.load(
            store, None if sizes is None else sizes.covisits, 0 if sizes is None else sizes.covisits_epoch
        )
        self.predictor.users.load(store, None if sizes is None else sizes.users)
        if sizes is None:
            return False
        self.predictor.similar.restore(min(sizes.similar, sizes.items))
        self.learned_from, self._saved_epochs = sizes.learned_from, sizes.epochs
        return True

    def _load_weights(self, reader: Reader) -> bool:
        (value,) = reader.get("soft", [_WEIGHTS])
        if value is None:
            return False
        packed = msgspec.msgpack.decode(value, type=dict[str, tuple[str, tuple[int, ...], bytes]])
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(data, dtype).reshape(shape) for name, (dtype, shape, data) in packed.items()
        }
        loaded = self.asked.load(arrays)
        self._saved_labels = self.asked.labels
        return loaded

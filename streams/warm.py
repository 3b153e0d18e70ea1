"""What speculation has learned, out to a bundle's priors and back in: what a partition without any past starts from.

In and out: `models.priors.Priors`. Never: anything that an answer depends on. What a partition has learned itself lies in its own
store (`streams.memory`).
"""

from __future__ import annotations

import numpy as np

from models.priors import Priors
from streams.asked import Asked
from streams.predict import Predictor

_COUNTS = "item_counts"
_SHARES = np.array([1.0, 4 / 24, 1.0], np.float32)  # of a popularity over 24 h, where the three counts are not known


def take_priors(priors: Priors, predictor: Predictor, now: int) -> None:
    """Popularity and co-visits as a bundle has them, as if they had been counted at `now`; at most `items_max` items."""
    names = priors.items[: predictor.config.items_max]
    if not names:
        return
    slots, count = predictor.table.intern(names, now), len(names)
    times, table = np.full(count, now, np.int64), predictor.table
    counts = priors.asked.get(_COUNTS)
    if counts is None or counts.shape != (len(priors.items), 3):
        counts = np.repeat(priors.popularity[:, None], 3, axis=1) * _SHARES
    for column, decayed in enumerate((table.demand_day, table.demand_4h, table.touched_day)):
        decayed.add(slots, times, counts[:count, column].astype(np.float64))
    others, weights = priors.covisit_index[:count], priors.covisit_weight[:count]
    row, place = np.nonzero((others >= 0) & (others < count) & (weights > 0))
    if len(row):
        times = np.full(len(row), now, np.int64)
        predictor.covisits.learn(slots[row], slots[others[row, place]], times, weights[row, place])


def make_priors(predictor: Predictor, asked: Asked, now: int, items_max: int) -> Priors:
    """The `items_max` most popular items with their co-visits among each other, and the weights of P(asked)."""
    table = predictor.table
    decayed = (table.demand_day, table.demand_4h, table.touched_day)
    counts = np.stack([one.read(slice(0, len(table)), now) for one in decayed], axis=1)
    popularity = counts[:, 0] + counts[:, 2]
    order = np.lexsort((np.arange(len(table)), -popularity))[:items_max]
    place = np.full(len(table) + 1, -1, np.int32)  # the last one for neighbours that are empty
    place[order] = np.arange(len(order))
    neighbors, shares = predictor.covisits.read(order)
    index = place[neighbors]
    return Priors(
        [table.names[slot] for slot in order.tolist()],
        popularity[order].astype(np.float32),
        index,
        np.where(index >= 0, shares, np.float32(0)),
        {**asked.export(), _COUNTS: counts[order].astype(np.float32)},
    )

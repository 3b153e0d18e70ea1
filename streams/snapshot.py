"""Snapshot: one user's two histories as the FM reads them, what it did and what it was shown, in one row of time.

In: the rows of `History` for a user, both kinds. Out: items, types and ts, newest last. Never: reads a table. The impressions are
the FM's negative evidence: what was shown and not touched tells as much of a taste as what was (docs/log.md).
"""

from __future__ import annotations

import numpy as np

from streams.history import HistoryRow


def snapshot(history: HistoryRow, shown: HistoryRow) -> HistoryRow:
    """Both kinds by (ts, offset), oldest first."""
    if not len(shown):
        return history
    ts, offsets = np.concatenate((history.ts, shown.ts)), np.concatenate((history.offsets, shown.offsets))
    order = np.lexsort((offsets, ts))
    items = [*history.items, *shown.items]
    types = np.concatenate((history.types, shown.types))
    return HistoryRow([items[at] for at in order.tolist()], types[order], ts[order], offsets[order])

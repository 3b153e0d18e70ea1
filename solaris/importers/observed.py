"""Requests of a log that has impressions: what was really shown together, and what the user then did with it.

In: the sorted columns of a log with impression events. Out: encoded requests with labels. Impressions of one request id are
one request; without ids, a user's impressions of one ts are. A candidate is labelled 1 when the user acts positively on it
within 30 min and before it is shown again (the last impression gets the credit). Nothing is made up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from schemas.events import POSITIVE_TYPES
from schemas.ranking import CANDIDATES_MAX
from solaris.importers.rows import Columns, Int64

CREDIT_MS = 30 * 60_000
CHUNK_IMPRESSIONS = 50_000
IMPRESSION = frozenset({"impression"})


class Observed:
    """One pass over a log's columns; iterate `lines()`, then read the counts."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.places: Int64 = np.flatnonzero(columns.kind_mask(IMPRESSION))
        self.labels = credit(columns, self.places)
        self.requests = self.pairs = self.repeated = self.cut = 0

    def groups(self) -> list[Int64]:
        """Per request the places of its impressions, requests in the order of their first impression."""
        columns, places = self.columns, self.places
        named = columns.request[places] >= 0
        keys = np.stack(
            [
                np.where(named, columns.request[places], -1),
                columns.user[places],
                np.where(named, 0, columns.ts[places]),
            ]
        )
        order = np.lexsort(keys)
        changed = (np.diff(keys[:, order], axis=1) != 0).any(axis=0)
        parts = np.split(places[order], np.flatnonzero(changed) + 1) if len(places) else []
        return sorted(parts, key=lambda part: int(part[0]))

    def lines(self) -> Iterator[list[str]]:
        """Chunks of encoded requests; a request's ts is that of its first impression."""
        columns = self.columns
        users, items, requests = columns.users.quoted(), columns.items.quoted(), columns.requests.quoted()
        label_of = np.zeros(len(columns), np.int8)
        label_of[self.places] = self.labels
        names, lines, taken = set(columns.requests.texts()), [], 0
        for part in self.groups():
            first = int(part[0])
            chosen: dict[int, int] = {}
            for item, label in zip(columns.item[part].tolist(), label_of[part].tolist(), strict=True):
                self.repeated += item in chosen
                chosen[item] = max(label, chosen.get(item, 0))
            shown = list(chosen.items())[:CANDIDATES_MAX]
            self.cut += len(chosen) - len(shown)
            code = columns.request[first]
            name = requests[code] if code >= 0 else self._fresh_name(names)
            lines.append(
                f'{{"request_id":{name},"user_id":{users[columns.user[first]]},'
                f'"candidates":[{",".join([items[item] for item, _ in shown])}],"ts":{columns.ts[first]},'
                f'"labels":[{",".join([str(label) for _, label in shown])}]}}'
            )
            self.requests, self.pairs, taken = self.requests + 1, self.pairs + len(shown), taken + len(part)
            if taken >= CHUNK_IMPRESSIONS:
                yield lines
                lines, taken = [], 0
        yield lines

    def _fresh_name(self, taken: set[str]) -> str:
        name = f"q{self.requests}"
        while name in taken:
            name += "'"
        return f'"{name}"'

    def note(self) -> str:
        """Sentences for `log.json`."""
        share = self.labels.mean() if len(self.labels) else 0.0
        left = f" Shown twice in a request: {self.repeated}; beyond {CANDIDATES_MAX} candidates: {self.cut}."
        return (
            f"Requests are the log's own impressions; {share:.4f} of {len(self.labels)} impressions were followed by a positive "
            f"event on the item within {CREDIT_MS // 60_000} min.{left if self.repeated or self.cut else ''}"
        )


def credit(columns: Columns, places: Int64) -> npt.NDArray[np.int8]:
    """0 or 1 for each impression at `places` [m]: a positive event of the pair comes before its next impression and in time."""
    positive = np.flatnonzero(columns.kind_mask(POSITIVE_TYPES))
    both = np.concatenate([places, positive])
    pair = np.unique(columns.user[both].astype(np.int64) << 32 | columns.item[both], return_inverse=True)[1]
    order = np.lexsort((both, pair))  # each pair's impressions and positive events in order of time
    follows = order[1:]
    same = pair[order[:-1]] == pair[follows]
    acted = (order[:-1] < len(places)) & (follows >= len(places)) & same
    acted &= columns.ts[both[follows]] - columns.ts[both[order[:-1]]] <= CREDIT_MS
    labels = np.zeros(len(places), np.int8)
    labels[order[:-1][acted]] = 1
    return labels

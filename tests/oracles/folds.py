"""The dumbest true statements about the folds: whole logs in lists, one loop a question, no panes kept, no batches."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

HOUR_MS = 3_600_000
IMPRESSION = 1
POSITIVE = (3, 4, 5, 6, 7, 8, 10)  # click, cart, favorite, buy, rating, like, share


class LoggedEvent(NamedTuple):
    """One event of a log; its place in the list is its offset."""

    user: str
    item: str
    kind: int
    ts: int


class LoggedVector(NamedTuple):
    """One vector of a log of embeddings; `code` are integers, its value is code * scale."""

    user: str
    space: int
    item: str
    as_of: int
    scale: float
    code: tuple[int, ...]


def history(log: Sequence[LoggedEvent], user: str, rows_max: int, impressions: bool) -> list[tuple[int, int, int, str]]:
    """(ts, offset, type, item) of the newest, oldest first."""
    mine = []
    for offset, event in enumerate(log):
        if event.user == user and (event.kind == IMPRESSION) == impressions:
            mine.append((event.ts, offset, event.kind, event.item))
    return sorted(mine)[-rows_max:]


def in_window(ts: int, now: int, pane_ms: int, window_ms: int) -> bool:
    """Whether the pane that `ts` lies in starts within (now - window, now]."""
    start = ts // pane_ms * pane_ms
    return now - window_ms < start <= now


def item_counts(log: Sequence[LoggedEvent], item: str, now: int) -> tuple[int, int]:
    """(impressions, positives) of the last day."""
    mine = [e for e in log if e.item == item and in_window(e.ts, now, HOUR_MS, 24 * HOUR_MS)]
    return sum(e.kind == IMPRESSION for e in mine), sum(e.kind in POSITIVE for e in mine)


def user_counts(log: Sequence[LoggedEvent], user: str, now: int) -> tuple[int, int]:
    """(events, positives) of the last day."""
    mine = [e for e in log if e.user == user and in_window(e.ts, now, HOUR_MS, 24 * HOUR_MS)]
    return len(mine), sum(e.kind in POSITIVE for e in mine)


def pairs(log: Sequence[LoggedVector]) -> tuple[dict[tuple[str, int, str], LoggedVector], list[str]]:
    """What is cached at the end of the log, and what became of each vector."""
    cached: dict[tuple[str, int, str], LoggedVector] = {}
    fates = []
    for vector in log:
        key = vector.user, vector.space, vector.item
        if key not in cached or vector.as_of > cached[key].as_of:
            cached[key] = vector
            fates.append("accepted")
        else:
            fates.append("duplicate" if vector.as_of == cached[key].as_of else "late")
    return cached, fates


def mean(
    log: Sequence[LoggedVector], user: str, space: int, now: int, pane_ms: int, window_ms: int
) -> tuple[list[Fraction], int, int]:
    """Exact mean of the vectors that were accepted and lie in the window, their count, the newest as_of (-1: none)."""
    mine = [
        vector
        for vector, fate in zip(log, pairs(log)[1], strict=True)
        if fate == "accepted"
        and (vector.user, vector.space) == (user, space)
        and in_window(vector.as_of, now, pane_ms, window_ms)
    ]
    if not mine:
        return [], 0, -1
    numbers = [[code * Fraction(vector.scale) for code in vector.code] for vector in mine]
    return (
        [sum(column, Fraction()) / len(mine) for column in zip(*numbers, strict=True)],
        len(mine),
        max(vector.as_of for vector in mine),
    )

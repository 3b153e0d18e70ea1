"""The features of one pair, computed the slow and plain way from lists: what `streams.features` must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

AGE_NEVER_HOURS = 24 * 30
HOUR_MS = 3_600_000


def dense_of_pair(
    item: str,
    now: int,
    history: Sequence[tuple[str, int]],
    shown: Sequence[tuple[str, int]],
    category: dict[str, int],
    content: dict[str, list[float]],
    item_counts: tuple[int, int],
    user_counts: tuple[int, int],
) -> list[float]:
    """The dense row of one pair; `history` and `shown` are (item, ts), newest last."""
    row = [*_counters(*item_counts), *_counters(*user_counts)]
    for rows in (history, shown):
        times = [ts for name, ts in rows if name == item]
        row += [math.log1p(len(times)), _age(now, times)]
    alike = [ts for name, ts in history if category[item] > 0 and category[name] == category[item]]
    row += [len(alike) / max(len(history), 1), _age(now, alike)]
    row.append(_cosine(content[item], _profile(history, content, len(content[item]))))
    row += [math.log1p(len(history)), _age(now, [ts for _, ts in history])]
    angle = (now / HOUR_MS) % 24 / 24 * 2 * math.pi
    return [*row, math.sin(angle), math.cos(angle)]


def _counters(impressions: int, positives: int) -> list[float]:
    trials = max(impressions, positives)
    rate = (positives + 1) / (trials + 10)
    return [math.log1p(impressions), math.log1p(positives), math.log(rate / (1 - rate))]


def _age(now: int, times: Sequence[int]) -> float:
    if not times:
        return math.log1p(AGE_NEVER_HOURS)
    return math.log1p(min(max(now - max(times), 0) / HOUR_MS, AGE_NEVER_HOURS))


def _profile(history: Sequence[tuple[str, int]], content: dict[str, list[float]], size: int) -> list[float]:
    mean = [0.0] * size
    for name, ts in history:
        weight = math.exp(-(history[-1][1] - ts) / (24 * HOUR_MS))
        mean = [total + weight * number for total, number in zip(mean, content[name], strict=True)]
    return mean


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.sqrt(sum(x * x for x in one)) * math.sqrt(sum(x * x for x in other))
    return sum(x * y for x, y in zip(one, other, strict=True)) / lengths if lengths else 0.0

"""Neighbours the slow and plain way: cosine with every user, one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nearest_mean(
    query: Sequence[float],
    users: Sequence[tuple[Sequence[float], Sequence[float], int]],
    k: int,
    now: int,
    window_ms: int,
) -> tuple[list[float], int] | None:
    """Weighted mean vector and age of the k nearest (key, value, newest as_of) users; None where nobody counts."""

    def cosine(one: Sequence[float], other: Sequence[float]) -> float:
        return sum(x * y for x, y in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))

    scored = sorted((-cosine(query, key), at) for at, (key, _, _) in enumerate(users))[:k]
    near = [(-minus, *users[at][1:]) for minus, at in scored if minus < 0 and now - users[at][2] < window_ms]
    total = sum(weight for weight, _, _ in near)
    if not near:
        return None
    vector = [sum(weight * value[place] for weight, value, _ in near) / total for place in range(len(near[0][1]))]
    return vector, int(sum(weight * max(now - newest, 0) for weight, _, newest in near) / total)

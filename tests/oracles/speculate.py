"""Dumb counterparts of what speculation computes in bulk: dictionaries and loops."""

from __future__ import annotations

from collections.abc import Sequence


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The min-max formula: fitted[i] = max over a <= i of min over b >= i of the weighted mean of values[a..b]."""

    def mean(a: int, b: int) -> float:
        return sum(v * w for v, w in zip(values[a : b + 1], weights[a : b + 1], strict=True)) / sum(weights[a : b + 1])

    n = len(values)
    return [max(min(mean(a, b) for b in range(i, n)) for a in range(i + 1)) for i in range(n)]


def distinct(named: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> dict[tuple[int, int], int]:
    """(owner, slot) → joined bits, of all that have a bit."""
    found: dict[tuple[int, int], int] = {}
    for owners, slots, bits in named:
        for owner, slot, bit in zip(owners, slots, bits, strict=True):
            found[owner, slot] = found.get((owner, slot), 0) | bit
    return {pair: bits for pair, bits in found.items() if bits}


def outcomes(
    considered: Sequence[tuple[int, int]], demands: Sequence[tuple[int, int]], ttl_ms: int
) -> list[tuple[int, int, bool]]:
    """Per considered (key, ts): whether some demand (key, ts') has ts < ts' <= ts + ttl."""
    return [
        (key, ts, any(other == key and ts < asked <= ts + ttl_ms for other, asked in demands)) for key, ts in considered
    ]

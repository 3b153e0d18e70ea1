"""Which candidates are worth an FM call: fresh and in-flight pairs go, the rest are ordered by value and bought at a shadow
price.

In: candidates with P(asked), the ledger's word on them, and the ranker's own probability v for the most promising. Out: the
admitted ones, and a counted reason for every other. Never: asks the FM itself, or spends more than the credit it has.

Value = P(asked) x v (1 - v). A logit z + e in place of z changes the expected log loss by E[e²]/2 · v (1 - v) to second order: its
curvature in the logit is v (1 - v). So where the ranker is sure, a vector can gain next to nothing however certain the demand;
E[e²] is taken as equal among pairs. `value = "asked"` ranks by P(asked) alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from schemas.inference import ITEMS_MAX
from streams.candidates import Mask, rank_in_group
from streams.sources import F64, I64, Index
from streams.state.column_log import Changed, ColumnLog
from streams.state.store import Store, Transaction

_FLOOR, _CEILING = 1e-9, 1.0
_BINS = 400
_EDGES = np.geomspace(_FLOOR, _CEILING, _BINS + 1)
_FALL = 8.0
_MARGIN = 0.25
_UNCERTAINTY_MAX = 0.25
_SCALE_MIN = 1e-100


@dataclass(frozen=True)
class VerifyConfig:
    """The FM budget and the limits around it. `pairs_per_ranked` > 0 replaces `pairs_per_s`; `pairs_per_s = inf` takes all."""

    pairs_per_s: float = 200.0
    """FM pairs per second of event time, over all partitions."""
    pairs_per_ranked: float = 0.0
    """FM pairs per pair that was ranked."""
    value: Literal["uncertainty", "asked"] = "uncertainty"
    window_ms: int = 30 * 60_000
    """Over how long the price looks back at what was on offer."""
    burst_ms: int = 10 * 60_000
    """Credit kept at rest, in time at the budget's rate; at most twice that is ever held."""
    request_pairs_max: int = 128
    """Pairs in one FM request."""
    scored_per_user_max: int = 128
    """Candidates of a user that the ranker scores."""
    refresh_ms: int = 30 * 60_000
    """A vector that expires sooner than this may be computed anew."""
    deadline_ms: int = 60_000
    """An FM request's deadline, counted from its record's append time."""
    grace_ms: int = 5 * 60_000
    """In flight for this much longer than the deadline."""
    ledger_rows_max: int = 1_000_000

    def __post_init__(self) -> None:
        if not 1 <= self.request_pairs_max <= ITEMS_MAX:
            raise ValueError(
                f"request_pairs_max is {self.request_pairs_max}; an fm-request holds 1 to {ITEMS_MAX} items"
            )
        for name in ("window_ms", "burst_ms", "ledger_rows_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")


class ShadowPrice:
    """The price of an FM pair that spends the budget and no more: one partition's dual variable.

    Feed-forward: a fading histogram of the values on offer says at which price a budget's worth of them was bought lately.
    Feedback: a token bucket that is half full at rest multiplies that aim by exp(gain x (credit - rest) / rest); its credit is
    the sum of all errors so far, so in steady state what is spent equals what is earned. Whatever is bought is paid from the
    bucket, so a burst is bounded by what it holds, and what a quiet time leaves beyond twice its rest is lost.
    """

    GAIN = 2.0

    def __init__(self, config: VerifyConfig, share: float) -> None:
        self._config = config
        self._per_ms = config.pairs_per_s * share / 1000.0
        self.unlimited = config.pairs_per_ranked <= 0 and not np.isfinite(self._per_ms)
        self.price = 0.0
        self.earned = self.spent = self.lost = 0.0
        self._recent = 0.0  # budget earned over the window, fading like the histogram
        self._offered = np.zeros(_BINS)  # times `_scale`: so fading changes no bin
        self._scale = 1.0
        self._changed, self._log = Changed(), ColumnLog("offered", [("offered", "<f8")])
        self._now = 0
        self.credit = self.rest

    @property
    def rest(self) -> float:
        """Pairs in the bucket at rest: the burst's worth, at least one request."""
        config = self._config
        if config.pairs_per_ranked > 0:
            return max(float(config.request_pairs_max), self._recent * config.burst_ms / config.window_ms)
        return max(1.0, self._per_ms * config.burst_ms)

    def earn(self, now: int, ranked: int) -> None:
        """Event time has come to `now` and `ranked` pairs were ranked since the last call; sets `price`."""
        if self.unlimited:
            return
        config, elapsed = self._config, max(0, now - self._now) if self._now else 0
        self._now = max(now, self._now)
        fade = float(np.exp(-elapsed / config.window_ms))
        if config.pairs_per_ranked > 0:
            earned = config.pairs_per_ranked * ranked
            self._recent = self._recent * fade + earned
        else:
            earned = self._per_ms * elapsed
            self._recent = self._recent * fade + self._per_ms * config.window_ms * (1.0 - fade)
        self._scale *= fade
        if self._scale < _SCALE_MIN:
            self._offered, self._scale = self._offered * self._scale, 1.0
            self._changed.everything()
        self.earned += earned
        full = 2.0 * self.rest
        self.lost += max(0.0, self.credit + earned - full)
        self.credit = min(self.credit + earned, full)
        self.price = max(self._aim(), self.price * float(np.exp(-_FALL * elapsed / config.window_ms)))
        if self.price < _FLOOR:
            self.price = 0.0

    def offer(self, values: F64) -> None:
        """Candidates on offer, bought or not."""
        if not self.unlimited:
            bins = _bin(values)
            self._offered += np.bincount(bins, minlength=_BINS) / self._scale
            self._changed.add(bins)

    def buy(self, values: F64) -> Mask:
        """Which of these to admit: at or above the price, the best first as far as the credit goes; pays for them."""
        admitted = values >= self.price
        if self.unlimited:
            return admitted
        room = max(0, int(self.credit))
        if int(admitted.sum()) > room:
            wanted = np.flatnonzero(admitted)
            order = wanted[np.argsort(-values[wanted], kind="stable")]
            admitted[order[room:]] = False
        bought = int(admitted.sum())
        self.credit -= bought
        self.spent += bought
        return admitted

    def save(self, txn: Transaction) -> tuple[float, ...]:
        """Write what was on offer; returns what `load` wants."""
        self._log.save(self._changed, 0, _BINS, {"offered": self._offered}, txn)
        return self.price, self.credit, self._recent, self._scale, float(self._now)

    def load(self, store: Store, numbers: tuple[float, ...] | None) -> None:
        """Go on from what was saved, if anything was; with another budget the credit is cut to what it may hold."""
        table = self._log.load(store, None if numbers is None else _BINS)
        if table is None or numbers is None or self.unlimited:
            self._changed.everything()
            return
        self.price, credit, self._recent, self._scale, now = numbers
        self._offered, self._now = table["offered"].copy(), int(now)
        self.credit = min(credit, 2.0 * self.rest)

    def _aim(self) -> float:
        """The price at which as much as aimed for was on offer in the window; 0 where less was."""
        rest = self.rest
        target = self._recent * float(np.exp(self.GAIN * (self.credit - rest) / rest))
        above = np.cumsum(self._offered[::-1] * self._scale)  # from the dearest bin down
        if not above[-1] > target:
            return 0.0
        at = int(np.searchsorted(above, target, side="right"))
        bin_ = _BINS - 1 - at
        before = above[at - 1] if at else 0.0
        part = (target - before) / max(1e-12, above[at] - before)
        return float(_EDGES[bin_ + 1] * (_EDGES[bin_] / _EDGES[bin_ + 1]) ** part)


class Verifier:
    """Judges candidates in two steps, before and after the ranker is asked; counts why each one fell."""

    def __init__(self, config: VerifyConfig, share: float) -> None:
        self.config = config
        self.price = ShadowPrice(config, share)
        self.dropped: Counter[str] = Counter()
        self.admitted = 0

    def shortlist(self, owner: Index, p_asked: F64, fresh: Mask, in_flight: Mask) -> I64:
        """Positions of the candidates that the ranker is to score: of each owner the likeliest, in the order of owners.

        Falls here: `fresh`, `in_flight`, `below_price` (even at the ranker's largest uncertainty, with a margin so that the
        price's histogram sees what lies below), `limit`.
        """
        best = p_asked * (1.0 if self.config.value == "asked" else _UNCERTAINTY_MAX)
        cheap = best < self.price.price * _MARGIN
        self.dropped["fresh"] += int(fresh.sum())
        self.dropped["in_flight"] += int((in_flight & ~fresh).sum())
        open_ = ~fresh & ~in_flight
        self.dropped["below_price"] += int((open_ & cheap).sum())
        left = np.flatnonzero(open_ & ~cheap)
        left = left[np.lexsort((-p_asked[left], owner[left]))]
        kept = left[rank_in_group(owner[left]) < self.config.scored_per_user_max]
        self.dropped["limit"] += len(left) - len(kept)
        return np.sort(kept)

    def values(self, p_asked: F64, scores: F64) -> F64:
        """Worth of scored candidates (see the top); a score that is not finite is worth nothing."""
        if self.config.value == "asked":
            return p_asked
        return np.where(np.isfinite(scores), p_asked * scores * (1.0 - scores), 0.0)

    def admit(self, owner: Index, values: F64) -> I64:
        """Positions of the admitted; falls here: `worthless`, `below_price`, `limit`, `credit`."""
        worth = values > 0
        self.dropped["worthless"] += int((~worth).sum())
        self.price.offer(values[worth])
        self.dropped["below_price"] += int((worth & (values < self.price.price)).sum())
        dear = np.flatnonzero(worth & (values >= self.price.price))
        dear = dear[np.lexsort((-values[dear], owner[dear]))]
        within = dear[rank_in_group(owner[dear]) < self.config.request_pairs_max]
        self.dropped["limit"] += len(dear) - len(within)
        bought = within[self.price.buy(values[within])]
        self.dropped["credit"] += len(within) - len(bought)
        self.admitted += len(bought)
        return np.sort(bought)


def _bin(values: F64) -> I64:
    position = (np.log(np.maximum(values, _FLOOR)) - np.log(_FLOOR)) * (_BINS / (np.log(_CEILING) - np.log(_FLOOR)))
    bins: I64 = np.clip(position.astype(np.int64), 0, _BINS - 1)
    return bins

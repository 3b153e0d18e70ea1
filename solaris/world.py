"""The made-up world behind `solaris generate`: users that drift, items that come and go, a serving policy that lags behind.

In: a config and one random generator. Out: per request the candidates, the true click probability and what was drawn.
State is per user and per item (rings of fixed length), so it doesn't grow with the days. Never writes, never reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
DIMENSIONS = 6
CANDIDATES_MAX = 10
SHOWN_ROWS_MAX = 64
CLICKED_ROWS_MAX = 8
REQUESTS_PER_SESSION_MAX = 4
QUIET_MS = 35 * 60_000
"""No user begins two sessions closer than this (plus the session's own length)."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class GenerateConfig:
    """The world's knobs; the defaults give about 25 impressions a user a day, CTR 17 %, and 85 % back within 24 h."""

    users: int = 400
    items: int = 700
    days: float = 10.0
    seed: int = 1
    ts_start: int = 1_767_225_600_000  # 2026-01-01T00:00:00Z
    ctr: float = 0.17
    ctr2: float = 0.10
    return_24h: float = 0.85
    gap_hours: float = 6.7  # scale of the gap between two sessions of one day
    away_hours: float = 75.0  # mean of what comes on top of 24 h when a user stays away
    item_life_days: float = 20.0
    categories: int = 24
    content_dimensions: int = 8
    content_noise: float = 0.6
    taste: float = 0.6  # logits per unit of user · item
    fatigue: float = 0.55  # logits lost per log2 of recent exposure
    policy_noise: float = 0.8
    policy_temperature: float = 0.68
    policy_refresh_hours: float = 12.0
    retarget: float = 3.0
    same_session: float = 2.3  # how much the policy holds back what it showed in the last half-hour


@dataclass
class Served:
    """What `n` requests showed: arrays [n, CANDIDATES_MAX], of which `kept` marks the candidates that exist."""

    users: Ints
    ts: Ints
    candidates: Ints
    kept: npt.NDArray[np.bool_]
    probability: npt.NDArray[np.int64]  # of a click, in units of 1e-4
    clicked: npt.NDArray[np.bool_]
    second: npt.NDArray[np.bool_]


@dataclass
class Items:
    """Items in the order of their birth; latent [i, 6] is hidden, content [i, c] is a noisy look at half of it."""

    birth: Ints
    expiry: Ints
    latent: Floats
    second: Floats
    quality: Floats
    category: Ints
    content: Floats

    @classmethod
    def draw(cls, config: GenerateConfig, rng: np.random.Generator) -> Items:
        """A stock that is in balance at the start, then births at the rate of deaths; `config.items` in all."""
        n, life, span = config.items, config.item_life_days * DAY_MS, config.days * DAY_MS
        stock = max(1, min(n, round(n / (1 + span / life))))
        born = np.sort(rng.uniform(0, span, n - stock))
        birth = np.concatenate([-np.sort(rng.exponential(life, stock))[::-1], born])
        left = np.concatenate([rng.exponential(life, stock), rng.exponential(life, n - stock)])
        expiry = np.maximum(birth, 0) + np.maximum(left, DAY_MS / 4)
        expiry[birth.argmax()] = expiry[0] = np.inf  # never an empty shelf
        expiry[: max(CANDIDATES_MAX, stock // 8)] = np.inf
        centres = rng.normal(0, 0.7, (config.categories, DIMENSIONS))
        category = rng.integers(0, config.categories, n)
        latent = centres[category] + rng.normal(0, 0.7, (n, DIMENSIONS))
        rotation, _ = np.linalg.qr(rng.normal(size=(DIMENSIONS, DIMENSIONS)))
        seen = latent[:, : DIMENSIONS // 2] @ rng.normal(0, 0.6, (DIMENSIONS // 2, config.content_dimensions))
        content = seen + rng.normal(0, config.content_noise, seen.shape)
        start = config.ts_start
        return cls(
            birth=np.maximum(birth, 1 - start).astype(np.int64) + start,
            expiry=np.minimum(expiry, 2.0**60).astype(np.int64) + start,
            latent=latent.astype(np.float32),
            second=(latent @ rotation).astype(np.float32),
            quality=rng.normal(0, 0.4, n).astype(np.float32),
            category=category,
            content=content.astype(np.float32),
        )


@dataclass
class Rhythm:
    """Bends even time into days with a night: `later` adds a gap of activity time, and 24 h of it are 24 h."""

    depth: float = 0.75
    trough_hour: float = 4.0
    grid: npt.NDArray[np.float64] = field(default_factory=lambda: np.linspace(0, DAY_MS, 1441))

    def later(self, ts: Ints, gap: npt.NDArray[np.float64], phase: npt.NDArray[np.float64]) -> Ints:
        """ts [n] plus gap [n] ms of activity; phase [n] ms shifts a user's day."""
        local = ts - phase
        goal = self._activity(local) + gap
        day, rest = np.divmod(goal, DAY_MS)
        clock = np.interp(rest, self._activity(self.grid) - self._activity(np.zeros(1)), self.grid)
        return (day * DAY_MS + clock + phase).astype(np.int64)

    def _activity(self, local: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        turn = 2 * np.pi / DAY_MS
        trough = self.trough_hour * HOUR_MS
        waves = np.sin(turn * (local - trough)) - np.sin(-turn * trough)
        return np.asarray(local - self.depth / turn * waves)


class World:
    """All users and items; `serve` answers one request each of many users, `close` ends their sessions."""

    def __init__(self, config: GenerateConfig, rng: np.random.Generator) -> None:
        self.config, self.rng, self.rhythm = config, rng, Rhythm()
        self.items = Items.draw(config, rng)
        n, start = config.users, config.ts_start
        self.static, self.slow, self.fast, noise = rng.standard_normal((4, n, DIMENSIONS)).astype(np.float32)
        self.viewed = start - rng.integers(0, DAY_MS, n)
        self.moved = self.viewed.copy()
        self.view = self._state(np.arange(n)) + config.policy_noise * noise
        self.phase = rng.normal(0, 2 * HOUR_MS, n)
        self.pace = rng.lognormal(0, 0.35, n)
        self.loyalty = np.clip(config.return_24h + rng.uniform(-0.1, 0.08, n), 0, 1)
        self.requests = np.zeros(n, np.int64)
        self.shown = np.full((n, SHOWN_ROWS_MAX), -1)
        self.shown_ms = np.zeros((n, SHOWN_ROWS_MAX), np.int64)
        self.liked = np.full((n, CLICKED_ROWS_MAX), -1)
        self.liked_ms = np.zeros((n, CLICKED_ROWS_MAX), np.int64)
        self.next_ms = self._first_ms()
        self.bias, self.bias2 = self._calibrate(config.ctr), self._calibrate(config.ctr2, second=True)

    def alive(self, ts: int) -> Ints:
        """Rows of the items that can be shown at `ts`."""
        return np.flatnonzero((self.items.birth <= ts) & (self.items.expiry > ts))

    def serve(self, users: Ints, ts: Ints, alive: Ints) -> Served:
        """One request of each of `users` [n] at ts [n]: pick, judge, draw, remember."""
        self._move(users, ts)
        candidates = self._pick(users, ts, alive)
        sizes = self.rng.integers(CANDIDATES_MAX - 2, CANDIDATES_MAX + 1, len(users))
        kept = (np.arange(CANDIDATES_MAX) < sizes[:, None]) & (candidates >= 0)
        state = self._state(users)
        tired = self.config.fatigue * np.log2(1 + self._exposure(users, ts, candidates))
        local = 2 * np.pi * (ts - self.phase[users]) / DAY_MS
        mood = 0.15 * np.sin(local - 2.4)[:, None]  # keener in the evening
        logit = self._taste(state, self.items.latent, candidates) + self.bias + mood - tired
        second = self._taste(state, self.items.second, candidates) + self.bias2
        probability = np.clip(np.rint(1e4 * _sigmoid(logit)), 10, 9990).astype(np.int64)
        draw = self.rng.random((2, *candidates.shape))
        clicked = kept & (draw[0] * 1e4 < probability)
        self._remember(users, ts, np.where(kept, candidates, -1), clicked)
        self.requests[users] += 1
        return Served(users, ts, candidates, kept, probability, clicked, kept & (draw[1] < _sigmoid(second)))

    def close(self, users: Ints, ts: Ints) -> None:
        """End the sessions of `users` [n], last request at ts [n]: refresh old views, choose when each comes back."""
        n, config = len(users), self.config
        old = ts - self.viewed[users] > config.policy_refresh_hours * HOUR_MS
        noise = self.rng.standard_normal((n, DIMENSIONS)).astype(np.float32)
        self.view[users[old]] = (self._state(users) + config.policy_noise * noise)[old]
        self.viewed[users[old]] = ts[old]
        self.next_ms[users] = self.rhythm.later(ts, self._gap(users), self.phase[users]) + QUIET_MS

    def _gap(self, users: Ints) -> npt.NDArray[np.float64]:
        """Activity time [n] until each comes back: within a day, or after a longer absence."""
        scale = self.config.gap_hours * self.pace[users]
        room = 24 - 2 * QUIET_MS / HOUR_MS
        draw = self.rng.random((2, len(users)))
        soon = -scale * np.log1p(-draw[0] * -np.expm1(-room / scale))  # exponential, cut at `room`
        away = room + self.rng.exponential(self.config.away_hours, len(users))
        return np.asarray(np.where(draw[1] < self.loyalty[users], soon, away) * HOUR_MS)

    def _first_ms(self) -> Ints:
        """First session of each user: a random moment of its endless row of gaps; one in ten arrives later."""
        n = self.config.users
        returns = np.cumsum([self._gap(np.arange(n)) + QUIET_MS for _ in range(64)], axis=0)  # [64, n]
        moment = self.rng.random(n) * returns[-1]
        wait = np.where(returns > moment, returns - moment, np.inf).min(axis=0)
        late = np.where(self.rng.random(n) < 0.1, self.rng.uniform(0, self.config.days * DAY_MS, n), 0)
        return self.rhythm.later(np.full(n, self.config.ts_start), late + wait, self.phase)

    def _state(self, users: Ints) -> Floats:
        return np.asarray(0.8 * self.static[users] + 1.0 * self.slow[users] + 0.7 * self.fast[users])

    def _move(self, users: Ints, ts: Ints) -> None:
        """Ornstein-Uhlenbeck steps, exact for any time between."""
        passed = (ts - self.moved[users])[:, None]
        for part, memory in ((self.slow, 5 * DAY_MS), (self.fast, 10 * HOUR_MS)):
            keep = np.exp(-passed / memory).astype(np.float32)
            fresh = self.rng.standard_normal((len(users), DIMENSIONS), dtype=np.float32)
            part[users] = keep * part[users] + np.sqrt(1 - keep * keep) * fresh
        self.moved[users] = ts

    def _pick(self, users: Ints, ts: Ints, alive: Ints) -> Ints:
        """The serving policy: its own old view of the user, quality, retargeting, chance; [n, 10], -1 where none is left."""
        items, n = self.items, len(users)
        score = self.config.taste * (self.view[users] @ items.latent[alive].T) + 0.5 * items.quality[alive]
        chance = np.maximum(self.rng.standard_exponential(score.shape, dtype=np.float32), 1e-30)
        score -= self.config.policy_temperature * np.log(chance)  # Gumbel noise: the top ones are a softmax sample
        column = np.full(len(items.birth) + 1, len(alive))  # row of an item → its column; the last column is nobody's
        column[alive] = np.arange(len(alive))
        score = np.concatenate([score, np.zeros((n, 1), np.float32)], axis=1)
        rows = np.arange(n)[:, None]
        age = (ts[:, None] - self.liked_ms[users]) / DAY_MS
        score[rows, column[self.liked[users]]] += (self.config.retarget * np.exp(-age)).astype(np.float32)
        recent = np.where(ts[:, None] - self.shown_ms[users] < QUIET_MS, self.shown[users], -1)
        score[rows, column[recent]] -= self.config.same_session
        score[:, -1] = -np.inf
        if score.shape[1] < CANDIDATES_MAX:
            score = np.pad(score, ((0, 0), (0, CANDIDATES_MAX - score.shape[1])), constant_values=-np.inf)
        top = np.argpartition(-score, CANDIDATES_MAX - 1, axis=1)[:, :CANDIDATES_MAX]
        top = np.take_along_axis(top, self.rng.random(top.shape).argsort(axis=1), axis=1)  # places tell nothing
        rank = np.append(alive, np.full(CANDIDATES_MAX, -1))[top]
        return np.asarray(np.where(np.isfinite(np.take_along_axis(score, top, axis=1)), rank, -1))

    def _exposure(self, users: Ints, ts: Ints, candidates: Ints) -> Floats:
        """How often each candidate was shown to its user, halved every 8 h; [n, 10]."""
        weight = np.exp2(-(ts[:, None] - self.shown_ms[users]) / (8 * HOUR_MS)).astype(np.float32)
        same = candidates[:, :, None] == self.shown[users][:, None, :]
        return np.asarray((same * weight[:, None, :]).sum(axis=2))

    def _taste(self, state: Floats, latent: Floats, candidates: Ints) -> Floats:
        match = np.einsum("nd,ncd->nc", state, latent[candidates])
        return np.asarray(self.config.taste * match + self.items.quality[candidates])

    def _remember(self, users: Ints, ts: Ints, shown: Ints, clicked: npt.NDArray[np.bool_]) -> None:
        now = np.broadcast_to(ts[:, None], shown.shape)
        self.shown[users] = np.concatenate([shown, self.shown[users, :-CANDIDATES_MAX]], axis=1)
        self.shown_ms[users] = np.concatenate([now, self.shown_ms[users, :-CANDIDATES_MAX]], axis=1)
        liked = np.concatenate([np.where(clicked, shown, -1), self.liked[users]], axis=1)
        when = np.concatenate([now, self.liked_ms[users]], axis=1)
        newest = np.argsort(liked < 0, axis=1, kind="stable")[:, :CLICKED_ROWS_MAX]
        self.liked[users] = np.take_along_axis(liked, newest, axis=1)
        self.liked_ms[users] = np.take_along_axis(when, newest, axis=1)

    def _calibrate(self, rate: float, *, second: bool = False) -> float:
        """The bias at which what the policy would show at the start is clicked at `rate`; fatigue is allowed for."""
        users = self.rng.integers(0, self.config.users, 2048)
        self._move(np.arange(self.config.users), np.full(self.config.users, self.config.ts_start))
        alive = self.alive(self.config.ts_start)
        candidates = self._pick(users, np.full(2048, self.config.ts_start), alive)
        taste = self._taste(self._state(users), self.items.second if second else self.items.latent, candidates)
        tired = 0.0 if second else 0.5 * self.config.fatigue
        low, high = -20.0, 20.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if _sigmoid(taste + middle - tired).mean() < rate else (low, middle)
        return low


def _sigmoid(x: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-x.astype(np.float64))))

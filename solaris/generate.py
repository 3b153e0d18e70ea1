"""Generate a log whose true probabilities are known: half-hours of sessions, encoded and streamed to disk in order.

In: a `GenerateConfig`. Out: a log folder (events, requests with labels, second labels and oracle, items, manifest).
The same config gives the same bytes. Memory depends on users, items and the busiest half-hour, never on the days.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import numpy as np

from schemas.errors import UsageError
from schemas.events import Item, encode_item
from schemas.log import LogManifest
from solaris.importers.folder import LogFolder
from solaris.world import (
    CANDIDATES_MAX,
    DAY_MS,
    QUIET_MS,
    REQUESTS_PER_SESSION_MAX,
    GenerateConfig,
    Ints,
    Items,
    Served,
    World,
)

STEP_MS = QUIET_MS - 5 * 60_000  # shorter than the quiet time: a user has at most one session a step
SCORES_MAX = 4_000_000  # users x items that the policy scores at once
CARTS_SHARE = 0.1  # of clicks

_CHANCES = [str(number / 10_000) for number in range(10_001)]
_at = itemgetter(0)


def generate(
    config: GenerateConfig,
    folder: Path,
    *,
    force: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> LogManifest:
    """Write a log to `folder`; `progress` is told the share that is done. Raises `UsageError` for impossible knobs."""
    check(config)
    rng = np.random.default_rng(config.seed)
    world = World(config, rng)
    end = config.ts_start + round(config.days * DAY_MS)
    tally, writer = _Tally(), _Lines(config)
    with LogFolder(folder, force=force) as out:
        out.write("items", _item_lines(world.items))
        for start in range(config.ts_start, end, STEP_MS):
            stop = min(start + STEP_MS, end)
            for served in _step(world, rng, start, stop, end):
                tally.add(served)
                writer.add(served, world, rng)
            until = stop if stop < end else None
            out.write("events", writer.events.take(until))
            out.write("requests", writer.requests.take(until))
            progress((stop - config.ts_start) / (end - config.ts_start))
        return out.finish(_manifest(config, out, writer, tally))


def check(config: GenerateConfig) -> None:
    """Raises `UsageError`, naming the knob, for a world that can't be made."""
    rules = {
        "users": config.users >= 1,
        "items": config.items >= 2 * CANDIDATES_MAX,
        "days": 0 < config.days <= 3650,
        "seed": config.seed >= 0,
        "ts_start": 100_000_000_000 <= config.ts_start <= 50_000_000_000_000,
        "ctr": 0.001 <= config.ctr <= 0.9,
        "ctr2": 0.001 <= config.ctr2 <= 0.9,
        "return_24h": 0 <= config.return_24h <= 1,
        "gap_hours": config.gap_hours > 0,
        "away_hours": config.away_hours >= 0,
        "taste": config.taste >= 0,
        "item_life_days": config.item_life_days > 0,
        "categories": config.categories >= 1,
        "content_dimensions": 1 <= config.content_dimensions <= 256,
        "content_noise": config.content_noise >= 0,
    }
    for name, holds in rules.items():
        if not holds:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} {getattr(config, name)} is out of range; see `solaris generate --help`")


def _step(world: World, rng: np.random.Generator, start: int, stop: int, end: int) -> Iterator[Served]:
    """All requests of the sessions that begin in [start, stop), a round of many users at a time; none at or after `end`."""
    due = np.flatnonzero(world.next_ms < stop)
    alive = world.alive(start)
    blocks = max(1, math.ceil(len(due) * len(alive) / SCORES_MAX))
    for users in np.array_split(due, blocks):
        sessions = 1 + rng.binomial(REQUESTS_PER_SESSION_MAX - 1, 0.45, len(users))
        ts = world.next_ms[users]
        for number in range(REQUESTS_PER_SESSION_MAX):
            open_ = (sessions > number) & (ts < end)
            if number:
                ts = ts + np.where(open_, 50_000 + rng.exponential(60_000, len(users)).clip(max=300_000), 0).astype(int)
                open_ &= ts < end
            if open_.any():
                yield world.serve(users[open_], ts[open_], alive)
        world.close(users, ts)


class _Ordered:
    """Lines that wait for their time; equal times keep the order in which they were added."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.first_ts, self.last_ts = 0, 0

    def take(self, until: int | None) -> list[str]:
        """Remove and return, in order, the lines with a ts below `until` (None: all of them)."""
        self.lines.sort(key=_at)
        ready = self.lines if until is None else [line for line in self.lines if line[0] < until]
        self.lines = self.lines[len(ready) :]
        if ready:
            self.first_ts, self.last_ts = self.first_ts or ready[0][0], ready[-1][0]
        return [line for _, line in ready]


class _Lines:
    """Encodes what was served: impressions at the request's ts, clicks 2-30 s later, some carts after them."""

    def __init__(self, config: GenerateConfig) -> None:
        self.user_names = [f"u{number}" for number in range(config.users)]
        self.item_names = [f"i{number}" for number in range(config.items)]
        self.events, self.requests = _Ordered(), _Ordered()

    def add(self, served: Served, world: World, rng: np.random.Generator) -> None:
        shape = served.candidates.shape
        clicked_ts = (served.ts[:, None] + rng.integers(2_000, 30_000, shape)).tolist()
        carts = (served.clicked & (rng.random(shape) < CARTS_SHARE)).tolist()
        events, requests = self.events.lines, self.requests.lines
        rows = zip(
            served.users.tolist(),
            world.requests[served.users].tolist(),
            served.ts.tolist(),
            served.candidates.tolist(),
            served.kept.tolist(),
            served.probability.tolist(),
            served.clicked.tolist(),
            served.second.tolist(),
            clicked_ts,
            carts,
            strict=True,
        )
        for user, number, ts, candidates, kept, chances, clicked, second, when, cart in rows:
            name = self.user_names[user]
            request = f"{name}-r{number}"
            there = [place for place, keep in enumerate(kept) if keep]
            names = [self.item_names[candidates[place]] for place in there]
            tail = f'"ts":{ts},"request_id":"{request}","event_id":"{request}-'
            for place, item in enumerate(names):
                line = f'{{"user_id":"{name}","item_id":"{item}","event_type":"impression",{tail}{place}"}}'
                events.append((ts, line))
            for place, item in zip(there, names, strict=True):
                if clicked[place]:
                    events.append((when[place], _event(name, item, "click", when[place], request, f"c{place}")))
                    if cart[place]:
                        at = when[place] + 10_000
                        events.append((at, _event(name, item, "cart", at, request, f"b{place}")))
            labels = ",".join(["1" if clicked[place] else "0" for place in there])
            labels2 = ",".join(["1" if second[place] else "0" for place in there])
            oracle = ",".join([_CHANCES[chances[place]] for place in there])
            head = f'{{"request_id":"{request}","user_id":"{name}","candidates":["{_QUOTED.join(names)}"],"ts":{ts},'
            requests.append((ts, f'{head}"labels":[{labels}],"labels2":[{labels2}],"oracle":[{oracle}]}}'))


_QUOTED = '","'


def _event(user: str, item: str, kind: str, ts: int, request: str, place: str) -> str:
    return (
        f'{{"user_id":"{user}","item_id":"{item}","event_type":"{kind}","ts":{ts},'
        f'"request_id":"{request}","event_id":"{request}-{place}"}}'
    )


def _item_lines(items: Items) -> list[str]:
    content = np.round(items.content.astype(np.float64), 3).tolist()
    columns = zip(items.category.tolist(), content, items.birth.tolist(), strict=True)
    return [
        encode_item(Item(f"i{number}", f"c{category}", values, ts)).decode()
        for number, (category, values, ts) in enumerate(columns)
    ]


@dataclass
class _Tally:
    """How many of each probability were drawn, and how many of them came true: all that the limits need."""

    drawn: Ints = field(default_factory=lambda: np.zeros(10_001, np.int64))
    true: Ints = field(default_factory=lambda: np.zeros(10_001, np.int64))
    second: int = 0

    def add(self, served: Served) -> None:
        self.drawn += np.bincount(served.probability[served.kept], minlength=10_001)
        self.true += np.bincount(served.probability[served.clicked], minlength=10_001)
        self.second += int(served.second.sum())

    def losses(self) -> tuple[int, float, float, float]:
        """(impressions, CTR, BCE of the true probabilities on the labels, BCE of the base rate)."""
        shown = int(self.drawn.sum())
        rate = self.true.sum() / max(shown, 1)
        if not 0 < rate < 1:
            return shown, float(rate), 0.0, 0.0
        chance = np.arange(10_001) / 10_000
        with np.errstate(divide="ignore"):
            gain, loss = np.log(chance), np.log1p(-chance)
        hits, misses = self.true, self.drawn - self.true
        limit = -(gain[hits > 0] @ hits[hits > 0] + loss[misses > 0] @ misses[misses > 0]) / shown
        base = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
        return shown, float(rate), float(limit), float(base)


def _manifest(config: GenerateConfig, out: LogFolder, writer: _Lines, tally: _Tally) -> LogManifest:
    shown, rate, limit, base = tally.losses()
    knobs = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())
    note = (
        f"{shown} impressions, CTR {rate:.4f}. Mean log loss (BCE): base rate {base:.5f}, "
        f"limit (oracle) {limit:.5f}, normalised entropy of the limit {limit / base if base else 0:.4f}. "
        f"Second label (rotated taste, no events): rate {tally.second / max(shown, 1):.4f}."
    )
    return LogManifest(
        source=f"solaris generate ({knobs})",
        events=out.lines["events"],
        requests=out.lines["requests"],
        items=out.lines["items"],
        first_ts=writer.requests.first_ts,
        last_ts=writer.events.last_ts,
        constructed=False,
        dropped={},
        label="click",
        note=note,
    )

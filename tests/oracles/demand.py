"""A small world with stationary demand, for tests of speculation: skewed popularity, tastes, re-visits; no models, no torch.

`World.steps` yields steps of event time: events, ranked requests. A ranked list is part the user's own earlier items, part
popular items of the user's categories, part popular items over all. `hour_weights` gives the day a rhythm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from models.features import F32, I32, Features, Vectors
from schemas.events import EventBatch, Item, type_code
from schemas.inference import Embeddings, FmRequest
from schemas.ranking import Basis, RankedItem, RankedResult
from streams.speculate import Speculate

START_MS = 1_700_000_000_000
MINUTE_MS = 60_000


@dataclass
class World:
    """Seeded generator; `users`, `items`, `categories` are counts, `list_length` the pairs of a request."""

    seed: int
    users: int = 120
    items: int = 1_500
    categories: int = 30
    list_length: int = 12
    visits_per_minute: float = 1.5
    hour_weights: Sequence[float] = (1.0,)
    step_minutes: int = 4
    mine: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        weight = 1.0 / np.arange(1, self.items + 1) ** 1.1
        self.popularity = weight / weight.sum()
        self.category = self.rng.integers(0, self.categories, self.items)
        self.tastes = np.array([self.rng.choice(self.categories, 3, replace=False) for _ in range(self.users)])
        activity = self.rng.gamma(0.7, 1.0, self.users) + 0.05
        self.activity = activity / activity.sum()
        self.offset = self.minute = 0

    def catalogue(self) -> list[tuple[str, Item | None]]:
        """Every item with its category."""
        return [(f"i{item}", Item(f"i{item}", f"c{self.category[item]}")) for item in range(self.items)]

    def steps(self, minutes: int) -> Iterator[tuple[EventBatch, list[tuple[str, int, list[str]]]]]:
        """Per step the events, and the requests as (user, ts, candidates); a second call goes on where the first ended."""
        for minute in range(self.minute, self.minute + minutes, self.step_minutes):
            self.minute = minute + self.step_minutes
            now = START_MS + minute * MINUTE_MS
            weight = self.hour_weights[minute // 60 % len(self.hour_weights)]
            visits = self.rng.poisson(self.visits_per_minute * weight * self.step_minutes)
            rows: list[tuple[int, str, str, str]] = []
            requests = []
            for user in self.rng.choice(self.users, visits, p=self.activity).tolist():
                ts = now + int(self.rng.integers(0, self.step_minutes * MINUTE_MS))
                asked = self._candidates(user)
                requests.append((f"u{user}", ts, [f"i{item}" for item in asked]))
                rows += [(ts, f"u{user}", f"i{item}", "impression") for item in asked[:4]]
                rows += [
                    (ts + 1, f"u{user}", f"i{item}", "click") for item in asked[: 1 + int(self.rng.integers(0, 2))]
                ]
                mine = self.mine.setdefault(user, [])
                mine.extend(asked[:3])
                del mine[:-25]
            yield self._batch(sorted(rows)), sorted(requests, key=lambda request: request[1])

    def _candidates(self, user: int) -> list[int]:
        mine = self.mine.get(user, [])
        again = self.rng.choice(mine, min(len(mine), 4)).tolist() if mine else []
        liked = np.isin(self.category, self.tastes[user]) * self.popularity
        taste = self.rng.choice(self.items, 4, p=liked / liked.sum()).tolist()
        rest = self.rng.choice(self.items, self.list_length, p=self.popularity).tolist()
        picked = list(dict.fromkeys([*again, *taste, *rest]))[: self.list_length]
        return [picked[at] for at in self.rng.permutation(len(picked))]

    def _batch(self, rows: list[tuple[int, str, str, str]]) -> EventBatch:
        offsets = np.arange(self.offset, self.offset + len(rows))
        self.offset += len(rows)
        ts = np.array([row[0] for row in rows], np.int64)
        types = np.array([type_code(row[3]) for row in rows], np.uint8)
        return EventBatch(0, offsets, ts, ts, [row[1] for row in rows], [row[2] for row in rows], types)


class FlatRanker:
    """The same probability for every pair: what is left of value is P(asked)."""

    def score(self, features: Features, vectors: Vectors | None = None) -> npt.NDArray[np.float64]:
        assert vectors is None, "speculation has no vectors"
        return np.full(len(features.request), 0.2)

    score_many = score

    def item_vectors(self, bucket: I32, category: I32, content: F32) -> F32:
        assert len(bucket) == len(category) == len(content)
        vectors = (bucket[:, None] * np.arange(1, 9) % 13).astype(np.float32) / np.float32(26)
        vectors[np.arange(len(bucket)), category % 8] += np.float32(1)
        return vectors


@dataclass
class Played:
    """What came of a run; pairs per phase are counted after `warm_minutes`."""

    ranked: int = 0
    exact: int = 0
    fm_pairs: int = 0
    per_step: list[int] = field(default_factory=list)
    requests: list[FmRequest] = field(default_factory=list)

    @property
    def coverage(self) -> float:
        return self.exact / max(1, self.ranked)


def play(world: World, speculate: Speculate, minutes: int, warm_minutes: int, latency_ms: int = MINUTE_MS) -> Played:
    """Run a world through one partition with a cache that is a dictionary and an FM that always answers after `latency_ms`."""
    ttl, out = speculate.config.ttl_ms, Played()
    cache: dict[tuple[str, str], int] = {}
    waiting: list[tuple[int, FmRequest]] = []
    heads = results_offset = 0
    first = world.minute
    for step, (batch, requests) in enumerate(world.steps(minutes)):
        minute = step * world.step_minutes
        end = START_MS + (first + minute + world.step_minutes) * MINUTE_MS
        done = [request for at, request in waiting if at <= end]
        waiting = [(at, request) for at, request in waiting if at > end]
        messages = [embeddings(request) for request in done]
        for message in messages:
            cache.update({(message.user, item): message.as_of for item in message.items})
        heads += len(messages)
        speculate.heads(messages, heads)
        results = []
        for user, ts, items in requests:
            exact = [ts - cache.get((user, item), -(1 << 60)) < ttl for item in items]
            results.append(result(user, ts, items, exact))
            if minute >= warm_minutes:
                out.ranked += len(items)
                out.exact += sum(exact)
        results_offset += len(results)
        made = speculate.events(batch, world.offset) + speculate.results(results, results_offset)
        waiting += [(request.as_of + latency_ms, request) for request in made]
        pairs = sum(len(request.items) for request in made)
        out.per_step.append(pairs)
        out.requests += made
        out.fm_pairs += pairs if minute >= warm_minutes else 0
    return out


def embeddings(request: FmRequest) -> Embeddings:
    """An answer of one number a pair."""
    n = len(request.items)
    return Embeddings(
        request.user, request.space, request.as_of, 0, request.items, np.ones(n, np.float32), np.ones((n, 1), np.int8)
    )


def result(user: str, ts: int, items: Sequence[str], exact: Sequence[bool], flags: Sequence[str] = ()) -> RankedResult:
    """A ranked result with the tier of each item."""
    ranked = [RankedItem(item, 0.2, "exact" if hit else "user") for item, hit in zip(items, exact, strict=True)]
    return RankedResult(f"{user}-{ts}", user, ts, ranked, list(flags), Basis(0, 0, 0, 0, 0, "b", "c"))

"""Requests for a log that has none: what could have been ranked just before a user acted, made up by a stated retrieval policy.

In: the sorted columns of a log. Out: encoded requests with labels, in the order of their ts, and what was counted.

Policy. At the first event of a user's session (a gap of 30 min) and at every k-th event after it, there is a request 1 ms
before. Positives: the items that the user touches from there to the next request or the session's end. Negatives: of every
four draws two from all earlier events, one from the user's own earlier events, one from earlier events in the category of one
of those; each draw is uniform over events, so an item comes up in proportion to its popularity so far. A draw that is a
positive or a repeat is passed over. Candidates are shuffled. Nothing is drawn from events at or after the request's ts.
It shares no code with what predicts requests: a policy that drew from the predictor would flatter it.

Rated logs (likes and dislikes) have no negatives to make up: a request's candidates are the next items that the user rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from schemas.errors import UsageError
from solaris.importers.rows import Columns, Int32, Int64

CHUNK_REQUESTS = 10_000
DRAWS_PER_CANDIDATE = 3

_Touch = tuple[int, bool, bool]
"""(item, whether anybody had touched it before the request, whether it is a like)."""


@dataclass(frozen=True)
class ConstructConfig:
    """`every`: k; `candidates`: most in a request; `unseen`: keep or drop positives that nobody touched before."""

    candidates: int = 15
    every: int = 5
    gap_ms: int = 30 * 60_000
    seed: int = 1
    unseen: str = "keep"

    def __post_init__(self) -> None:
        if not 2 <= self.candidates <= 1000:
            raise UsageError(f"--candidates {self.candidates}: a request has 2 to 1000")
        if self.every < 1 or self.gap_ms < 1:
            raise UsageError(f"--every {self.every}, session gap {self.gap_ms} ms: both must be at least 1")
        if self.unseen not in ("keep", "drop"):
            raise UsageError(f"--unseen {self.unseen} is neither keep nor drop")


@dataclass
class ConstructReport:
    """What was made: counts, and how many positives existed (somebody had touched the item) before the request."""

    requests: int = 0
    pairs: int = 0
    positives: int = 0
    existed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


class Construct:
    """One pass over a log's columns; iterate `lines()`, then read `report`."""

    def __init__(self, columns: Columns, config: ConstructConfig, *, rated: bool = False) -> None:
        self.columns, self.config, self.rated, self.report = columns, config, rated, ConstructReport()
        self.order: Int64 = np.argsort(columns.user, kind="stable")  # by user, then time
        self.item: Int32 = columns.item[self.order]
        self.first = np.full(len(columns.category), len(columns))  # place of each item's first event
        np.minimum.at(self.first, columns.item, np.arange(len(columns)))
        self.user_start = _starts(columns.user[self.order])
        self.category = _Category(columns)
        every, gap_ms = (config.candidates, 1 << 62) if rated else (config.every, config.gap_ms)
        ts = columns.ts[self.order]
        anchors = find_anchors(columns.user[self.order], ts, every, gap_ms)
        ends = np.append(anchors[1:], len(columns))
        turn = np.lexsort((self.order[anchors], ts[anchors]))
        self.anchors, self.ends = anchors[turn], ends[turn]
        self.ts = ts[self.anchors] - 1

    def lines(self) -> Iterator[list[str]]:
        """Chunks of encoded requests."""
        rng = np.random.default_rng(self.config.seed)
        users, items = self.columns.users.quoted(), self.columns.items.quoted()
        liked = self.columns.kind_mask(frozenset({"like"}))[self.order]
        for start in range(0, len(self.anchors), CHUNK_REQUESTS):
            part = slice(start, start + CHUNK_REQUESTS)
            anchors, ts = self.anchors[part], self.ts[part]
            known = np.searchsorted(self.columns.ts, ts)  # events strictly before the request
            draws = self._draw(anchors, known, rng) if not self.rated else None
            shuffle = rng.random((len(anchors), self.config.candidates)).argsort(axis=1).tolist()
            who = self.columns.user[self.order[anchors]].tolist()
            when: list[int] = ts.tolist()
            lines = []
            for row, stretch in enumerate(self._stretches(part, known, liked)):
                labelled = self._rated(stretch) if draws is None else self._drawn(stretch, draws[row])
                if labelled is None:
                    continue
                pairs = list(labelled.items())
                pairs = [pairs[place] for place in shuffle[row] if place < len(pairs)]
                lines.append(
                    f'{{"request_id":"q{self.report.requests}","user_id":{users[who[row]]},'
                    f'"candidates":[{",".join([items[item] for item, _ in pairs])}],"ts":{when[row]},'
                    f'"labels":[{",".join(["1" if label else "0" for _, label in pairs])}]}}'
                )
                self.report.requests += 1
                self.report.pairs += len(pairs)
            yield lines

    def _stretches(self, part: slice, known: Int64, liked: npt.NDArray[np.bool_]) -> Iterator[list[_Touch]]:
        """Per request (item, existed before, liked) of the events that it anticipates."""
        anchors, ends = self.anchors[part], self.ends[part]
        counts = ends - anchors
        after = np.cumsum(counts)
        flat = np.arange(counts.sum()) + np.repeat(anchors - (after - counts), counts)
        item = self.item[flat]
        existed = self.first[item] < np.repeat(known, counts)
        touches = list(zip(item.tolist(), existed.tolist(), liked[flat].tolist(), strict=True))
        start = 0
        for end in after.tolist():
            yield touches[start:end]
            start = end

    def _drawn(self, stretch: list[_Touch], draws: list[int]) -> dict[int, int] | None:
        """Item → label: positives (at most half of the places), then the draws that are new."""
        touched = {item: existed for item, existed, _ in stretch}
        drop = self.config.unseen == "drop"
        wanted = [item for item, existed in touched.items() if existed or not drop]
        positives = wanted[: max(1, self.config.candidates // 2)]
        chosen = dict.fromkeys(positives, 1)
        room = self.config.candidates - len(chosen)
        for item in draws:
            if item not in touched and item not in chosen:
                chosen[item] = 0
                room -= 1
                if not room:
                    break
        if len(chosen) == len(positives):
            self.report.skipped["no_earlier_item_to_draw"] += 1
            return None
        if not positives:
            self.report.skipped["no_positive_existed"] += 1
            return None
        self.report.positives += len(positives)
        self.report.existed += sum([touched[item] for item in positives])
        self.report.skipped["positives_beyond_half_of_the_candidates"] += len(wanted) - len(positives)
        return chosen

    def _rated(self, stretch: list[_Touch]) -> dict[int, int]:
        """Item → label: the next rated items; where one is rated twice the first counts."""
        chosen: dict[int, int] = {}
        for item, existed, liked in stretch:
            if item in chosen:
                continue
            if len(chosen) == self.config.candidates:
                self.report.skipped["ratings_beyond_the_candidates"] += 1
                continue
            chosen[item] = int(liked)
            self.report.positives += liked
            self.report.existed += liked and existed
        return chosen

    def _draw(self, anchors: Int64, known: Int64, rng: np.random.Generator) -> list[list[int]]:
        """Items drawn for each request [r][3 x candidates]; empty where nothing happened before it."""
        chance = rng.random((len(anchors), DRAWS_PER_CANDIDATE * self.config.candidates))
        drawn = self.columns.item[(chance * np.maximum(known, 1)[:, None]).astype(np.int64)]
        start = self.user_start[self.columns.user[self.order[anchors]]][:, None]
        past = anchors[:, None] - start
        for column in (2, 3):
            popular = drawn[:, column::4]
            place = (start + (rng.random(popular.shape) * past).astype(np.int64)).clip(max=len(self.item) - 1)
            # the own past may touch the request's own ms: only what lies strictly before counts
            own = np.where((past > 0) & (self.order[place] < known[:, None]), self.item[place], popular)
            alike = self.category.draw(own, rng.random(own.shape), known) if column == 3 else own
            drawn[:, column::4] = np.where(alike >= 0, alike, popular)
        rows: list[list[int]] = drawn.tolist()
        return [row if count else [] for row, count in zip(rows, known.tolist(), strict=True)]

    def note(self) -> str:
        """Sentences for `log.json`."""
        r, c = self.report, self.config
        share = r.existed / max(r.positives, 1)
        left = "".join(f" {name}: {count}." for name, count in sorted(r.skipped.items()) if count)
        # a ranker that counts would tell an item that nobody has touched from drawn ones, all of which somebody has
        trap = (
            ""
            if self.rated or c.unseen == "drop"
            else (
                " A candidate that nobody had touched is always a positive, which any fresh counter gives away: compare log "
                "losses on an import with --unseen drop."
            )
        )
        how = (
            f"the next {c.candidates} rated items"
            if self.rated
            else f"positives of the next {c.every} events (session gap {c.gap_ms // 60_000} min) and earlier items drawn "
            f"2:1:1 by popularity, own past, own categories; positives nobody had touched before: {c.unseen}"
        )
        return (
            f"Requests are constructed ({how}; at most {c.candidates} candidates, seed {c.seed}). {r.pairs} pairs, "
            f"{r.positives} positive; {share:.4f} of the positives existed before the request (the reachable ceiling).{trap}{left}"
        )


class _Category:
    """Draws from the earlier events of a category."""

    def __init__(self, columns: Columns) -> None:
        kind = columns.category[columns.item].astype(np.int64)
        self.rows = max(len(columns), 1)
        by_category = np.argsort(kind, kind="stable")
        self.keys = kind[by_category] * self.rows + by_category  # (category, place) in one sorted number
        self.item = columns.item[by_category]
        self.of_item = columns.category.astype(np.int64)

    def draw(self, items: Int32, chance: npt.NDArray[np.float64], known: Int64) -> Int64:
        """For items [r, n] an item of the same category from the first `known` [r] events; -1 where there is none."""
        kind = self.of_item[items]
        low = np.searchsorted(self.keys, kind * self.rows)
        high = np.searchsorted(self.keys, kind * self.rows + known[:, None])
        place = (low + (chance * (high - low)).astype(np.int64)).clip(max=len(self.item) - 1)
        return np.asarray(np.where((kind >= 0) & (high > low), self.item[place], -1))


def find_anchors(user: Int32, ts: Int64, every: int, gap_ms: int) -> Int64:
    """Places, in events sorted by (user, ts) [n], before which a request is made.

    The first event of each session and about every `every`-th after it; never between events of one time, since a request
    1 ms earlier would then lie before an event that it is meant to follow.
    """
    if not len(user):
        return np.zeros(0, np.int64)
    new_user = np.append(True, user[1:] != user[:-1])
    step = np.append(gap_ms, np.diff(ts))
    new_session = new_user | (step >= gap_ms)
    place = np.arange(len(user))
    session_start = np.maximum.accumulate(np.where(new_session, place, 0))
    free = np.flatnonzero(new_session | (step > 0))  # not tied with the event before
    block = (place - session_start)[free] // every
    moved = np.append(True, block[1:] != block[:-1])
    return np.asarray(free[moved | new_session[free]], np.int64)


def _starts(sorted_codes: Int32) -> Int64:
    """Where each code begins in a sorted column, by code."""
    if not len(sorted_codes):
        return np.zeros(0, np.int64)
    return np.searchsorted(sorted_codes, np.arange(int(sorted_codes[-1]) + 1))

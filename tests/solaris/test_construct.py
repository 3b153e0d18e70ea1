"""Constructed requests against their own rules, on random logs full of ties: nothing from the future, everything labelled right."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from schemas.errors import UsageError
from solaris.importers.construct import Construct, ConstructConfig, find_anchors
from solaris.importers.rows import Columns, Rows

GAP = 30 * 60_000
START = 1_700_000_000_000


def random_columns(seed: int, *, rows: int = 600, tick: int = 60_000, rated: bool = False) -> Columns:
    """Six users, popular and rare items, times that tie."""
    rng, made = np.random.default_rng(seed), Rows()
    for number in range(rows):
        item = int(rng.zipf(1.4)) % 80 if rng.random() < 0.7 else 1000 + number
        kind = (b"like" if rng.random() < 0.6 else b"dislike") if rated else b"view"
        ts = START + int(rng.integers(0, 2000)) * tick
        made.add(b"u%d" % rng.integers(0, 6), b"i%d" % item, kind, ts, b"c%d" % (item % 5))
    return made.columns()


def constructed(columns: Columns, **config: Any) -> tuple[Construct, list[dict[str, Any]]]:
    rated = config.pop("rated", False)
    construct = Construct(columns, ConstructConfig(**config), rated=rated)
    return construct, [json.loads(line) for lines in construct.lines() for line in lines]


def events_of(columns: Columns) -> list[tuple[str, str, int, str]]:
    users, items, kinds = columns.users.texts(), columns.items.texts(), columns.kinds.texts()
    columns_ = zip(columns.user, columns.item, columns.ts, columns.kind, strict=True)
    return [(users[user], items[item], int(ts), kinds[kind]) for user, item, ts, kind in columns_]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tick", [1, 60_000])
def test_every_rule_on_random_logs(seed: int, tick: int) -> None:
    columns = random_columns(seed, tick=tick)
    construct, requests = constructed(columns, candidates=8, every=3)
    events = events_of(columns)
    assert [request["ts"] for request in requests] == sorted(request["ts"] for request in requests)
    assert len({request["request_id"] for request in requests}) == len(requests) == construct.report.requests
    existed = 0
    users = columns.users.texts()
    asked = columns.user[construct.order[construct.anchors]]
    anchors = [(users[who], int(when)) for who, when in zip(asked, construct.ts, strict=True)]
    for request in requests:
        ts, user = request["ts"], request["user_id"]
        before = {item for _, item, when, _ in events if when < ts}
        own = [(item, when) for who, item, when, _ in events if who == user]
        later = [(item, when) for item, when in own if when > ts]
        positives = {item for item, label in zip(request["candidates"], request["labels"], strict=True) if label}
        negatives = set(request["candidates"]) - positives
        assert negatives
        assert negatives <= before  # no glimpse of the future
        assert positives <= {item for item, _ in later}
        assert later[0][1] == ts + 1  # the event that it anticipates comes next
        assert len(set(request["candidates"])) == len(request["candidates"]) <= 8
        until = min([when for who, when in anchors if who == user and when > ts], default=START * 2)
        assert positives == set(list(dict.fromkeys(_stretch(later, until)))[:4])
        existed += len(positives & before)
    assert construct.report.existed == existed
    assert construct.report.positives == sum(sum(request["labels"]) for request in requests)
    share = f"{existed / construct.report.positives:.4f} of the positives existed"
    assert share in construct.note()


def _stretch(later: list[tuple[str, int]], until: int) -> list[str]:
    """Items from the first event on, up to the next request and never across a session's gap."""
    found = [later[0][0]]
    for (_, before), (item, when) in itertools.pairwise(later):
        if when > until or when - before >= GAP:
            break
        found.append(item)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_anchors_are_those_of_the_slow_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    user = np.sort(rng.integers(0, 4, 200)).astype(np.int32)
    ts = np.concatenate([np.sort(rng.integers(0, 60, (user == who).sum())) for who in range(4)]) * 5 * 60_000
    slow, session, block = [], 0, 0
    for place in range(200):
        first = place == 0 or user[place] != user[place - 1] or ts[place] - ts[place - 1] >= GAP
        if first:
            session, block = place, -1
        tied = not first and ts[place] == ts[place - 1]
        if not tied:
            if (place - session) // 3 > block:
                slow.append(place)
            block = (place - session) // 3
    assert find_anchors(user, ts, 3, GAP).tolist() == slow


def test_no_event_no_request() -> None:
    assert find_anchors(np.zeros(0, np.int32), np.zeros(0, np.int64), 3, GAP).tolist() == []


def test_same_seed_same_requests_other_seed_other_negatives() -> None:
    first, again, other = (constructed(random_columns(1), seed=seed)[1] for seed in (1, 1, 2))
    assert first == again
    assert [sum(request["labels"]) for request in first] == [sum(request["labels"]) for request in other]
    assert first != other


def test_later_events_do_not_change_earlier_requests() -> None:
    """The log cut in half gives the same first half of the requests, but for the last stretch of each user."""
    whole = random_columns(3)
    events = events_of(whole)
    cut = len(events) // 2
    half = Rows()
    for user, item, ts, kind in events[:cut]:
        half.add(user.encode(), item.encode(), kind.encode(), ts, b"c%d" % (int(item[1:]) % 5))
    early = {(r["user_id"], r["ts"]): r for r in constructed(half.columns())[1]}
    full = {(r["user_id"], r["ts"]): r for r in constructed(whole)[1]}
    last = {user: max(ts for who, ts in early if who == user) for user, _ in early}
    checked = [key for key in early if key[1] < last[key[0]] and key in full]
    assert len(checked) > 10
    for key in checked:
        positives = [
            {i for i, y in zip(r["candidates"], r["labels"], strict=True) if y} for r in (early[key], full[key])
        ]
        assert positives[0] == positives[1]


def test_negatives_are_popular_own_and_alike() -> None:
    """A popular item comes up in proportion to its events; the user's own past is a quarter of the draws."""
    made = Rows()
    for number in range(900):
        made.add(b"crowd", b"hit" if number % 3 else b"i%d" % number, b"view", START + number * 1000)
    for number in range(20):
        made.add(b"me", b"mine%d" % number, b"view", START + 10**7 + number * 1000)
    made.add(b"me", b"next", b"view", START + 2 * 10**7)
    construct, _ = constructed(made.columns(), candidates=15)
    last = np.flatnonzero(construct.ts == START + 2 * 10**7 - 1)
    draws: list[str] = []
    names = construct.columns.items.texts()
    for seed in range(100):
        rng = np.random.default_rng(seed)
        draws += [names[item] for item in construct._draw(construct.anchors[last], np.array([920]), rng)[0]]
    assert 0.2 < np.mean([name.startswith("mine") for name in draws]) < 0.3
    shared = [name for name in draws if not name.startswith("mine")]
    assert 0.6 < np.mean([name == "hit" for name in shared]) < 0.72


def test_alike_items_come_from_the_category_of_the_own_past() -> None:
    made = Rows()
    for number in range(300):
        made.add(b"crowd", b"i%d" % number, b"view", START + number * 1000, b"c%d" % (number % 30))
    made.add(b"me", b"i0", b"view", START + 10**7, b"c0")
    made.add(b"me", b"next", b"view", START + 2 * 10**7, b"c9")
    construct, _ = constructed(made.columns(), candidates=40)
    anchor = construct.anchors[construct.ts == START + 2 * 10**7 - 1]
    draws = construct._draw(anchor, np.array([301]), np.random.default_rng(0))[0]
    names = construct.columns.items.texts()
    assert {names[item] for item in draws[2::4]} == {"i0"}
    alike = {names[item] for item in draws[3::4]}
    assert len(alike) > 3
    assert alike <= {f"i{number}" for number in range(0, 300, 30)}


def test_unseen_positives_can_be_dropped() -> None:
    columns = random_columns(2)
    kept, _ = constructed(columns)
    dropped, requests = constructed(columns, unseen="drop")
    events = events_of(columns)
    for request in requests:
        assert set(request["candidates"]) <= {item for _, item, when, _ in events if when < request["ts"]}
        assert any(request["labels"])
    assert dropped.report.positives == dropped.report.existed < kept.report.positives
    assert dropped.report.skipped["no_positive_existed"] > 0
    assert "--unseen drop" in kept.note()


def test_rated_requests_are_the_next_ratings() -> None:
    columns = random_columns(5, rated=True)
    construct, requests = constructed(columns, rated=True, candidates=6)
    events = events_of(columns)
    total = 0
    for request in requests:
        later = [
            (item, kind) for user, item, when, kind in events if user == request["user_id"] and when > request["ts"]
        ]
        first: dict[str, int] = {}
        for item, kind in later:
            first.setdefault(item, int(kind == "like"))
        assert {item: first[item] for item in request["candidates"]} == dict(
            zip(request["candidates"], request["labels"], strict=True)
        )
        total += len(request["candidates"])
    assert construct.report.pairs == total > 400
    assert 0 < construct.report.positives < total


@pytest.mark.parametrize("wrong", [{"candidates": 1}, {"candidates": 1001}, {"every": 0}, {"unseen": "maybe"}])
def test_wrong_options_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ConstructConfig(**wrong)


def test_a_long_log_of_ties_still_gives_requests() -> None:
    made = Rows()
    for number in range(100):
        made.add(b"a", b"i%d" % (number % 70), b"view", START + (number // 50) * 1000)
    construct, requests = constructed(made.columns(), candidates=10)
    assert [request["ts"] for request in requests] == [START + 999]
    assert sum(requests[0]["labels"]) == 5
    assert construct.report.skipped["no_earlier_item_to_draw"] == 1
    assert construct.report.skipped["positives_beyond_half_of_the_candidates"] == 45

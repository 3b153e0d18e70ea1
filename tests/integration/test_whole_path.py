"""A log played through all three workers: each request has its one result, and the books of the FM balance."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import jsonschema  # type: ignore[import-untyped] # it has no stubs
import pytest

from agents.player import Player
from schemas.log import Log, LoggedRequest, merge
from schemas.ranking import TIERS, decode_result
from schemas.topics import EVENTS
from tests.integration.fleet import until
from tests.integration.installation import ROLES, Installation, strict_json

HOUR_MS = 3_600_000
SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "ranked-results.json"

pytestmark = pytest.mark.timeout(180)


def test_a_log_goes_through_the_whole_path(install: Callable[..., Installation], log: Log) -> None:
    here = install()
    speculate, infer, serve = here.start(*ROLES)
    from agents.groups import worker_lag

    player = Player(here.kafka, lag=worker_lag(here.kafka), ahead_ms_max=HOUR_MS)
    player.catalogue(log)  # after the workers' start: they must follow it
    played = player.play(log)
    here.settle()
    assert played.undelivered == 0
    assert played.events == log.manifest.events

    answers = here.answers()
    asked = {(str(request.user_id), str(request.request_id)): request for request in log.requests()}
    assert len(asked) == log.manifest.requests > 50
    assert answers.keys() == asked.keys()
    assert {len(values) for values in answers.values()} == {1}

    schema = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_bytes()))
    tiers: Counter[str] = Counter()
    for key, (value,) in answers.items():
        schema.validate(strict_json(value))
        result = decode_result(value)
        assert {item.item_id for item in result.items} == set(map(str, asked[key].candidates))
        assert result.flags == []
        tiers.update(item.tier for item in result.items)
    assert set(tiers) <= set(TIERS)
    assert tiers["exact"] > 0
    assert tiers["user"] > 0

    _assert_cause_and_effect(here, log)

    assert max(decode_result(value).basis.items for (value,) in answers.values()) == log.manifest.items
    assert here.dead_letters() == []
    assert here.lag() == 0

    def books() -> tuple[int, int, int]:
        dropped = infer.counts.get("dropped", {})
        return speculate.counts.get("admitted", 0), infer.counts.get("pairs_computed", 0), sum(dropped.values())

    until(lambda: books()[0] == books()[1] + books()[2] > 0, 10, lambda: f"asked, computed, dropped: {books()}")
    assert {worker.stop() for worker in (speculate, infer, serve)} == {0}
    assert books()[0] == books()[1] + books()[2]
    assert serve.counts["requests"] == len(asked)  # the last word of a stopped worker still has its counts


def _assert_cause_and_effect(here: Installation, log: Log) -> None:
    """A result rests on all that its user did before the request, and on nothing of what came after."""
    offsets: dict[str, list[int]] = defaultdict(list)
    for message in here.read(EVENTS):
        offsets[(message.key() or b"").decode()].append(message.offset() or 0)
    results, done = here.results(), Counter[str]()
    missed, leaked, judged = [], [], 0
    for _, record in merge(log.events(), log.requests()):
        user = str(record.user_id)
        if not isinstance(record, LoggedRequest):
            done[user] += 1
            continue
        folded = results[user, str(record.request_id)].basis.events
        before, after = offsets[user][: done[user]], offsets[user][done[user] :]
        judged += bool(before and after)
        missed += [record.request_id for offset in before[-1:] if offset >= folded]
        leaked += [record.request_id for offset in after[:1] if offset < folded]
    assert judged > 50
    assert (missed, leaked) == ([], [])

"""Three speculate and three serve workers on four partitions: they come and go while a log is played."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest

from schemas.log import Log
from schemas.ranking import decode_result
from schemas.topics import RANKED_RESULTS
from tests.integration.fleet import until
from tests.integration.installation import PARTITIONS, ROLES, Installation
from tests.integration.playing import Playing

pytestmark = pytest.mark.timeout(150)


def test_workers_that_come_and_go_answer_every_request_once_and_in_order(
    install: Callable[..., Installation], log: Log
) -> None:
    here = install()
    here.start(*ROLES)
    playing = Playing(here, log)
    try:
        until(lambda: here.end(RANKED_RESULTS) > 0, 30, "first results")
        here.start("serve:serve-b", "speculate:speculate-b", "serve:serve-c", "speculate:speculate-c")
        serves = [worker for worker in here.workers if worker.role == "serve"]
        speculates = [worker for worker in here.workers if worker.role == "speculate"]
        for group in (serves, speculates):
            until(
                lambda group=group: sorted(p for w in group for p in w.counts.get("partitions", [])) == list(range(PARTITIONS)),  # type: ignore[misc]
                20, "each partition at one worker",
            )  # fmt: skip
            assert all(worker.counts["partitions"] for worker in group), "a worker without a partition"
        assert serves[0].stop() == 0
    finally:
        playing.join()
    here.settle()

    answers = here.answers()
    assert answers.keys() == {(str(r.user_id), str(r.request_id)) for r in log.requests()}
    assert {key: values for key, values in answers.items() if len(values) > 1} == {}  # orderly moves repeat nothing
    offsets: dict[str, list[int]] = defaultdict(list)
    for message in here.read(RANKED_RESULTS):
        result = decode_result(message.value())
        offsets[result.user_id].append(result.basis.request_offset)
    assert {user: seen for user, seen in offsets.items() if seen != sorted(seen)} == {}
    assert here.dead_letters() == []
    stopped = [worker for worker in here.workers if worker.alive]
    assert {worker.stop() for worker in stopped} == {0}
    assert sum(worker.counts["requests"] for worker in serves) == len(answers)  # of partitions that moved away, too

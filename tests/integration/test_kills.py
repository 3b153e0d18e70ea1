"""Each worker is killed while a log is played, and serve once more with its state wiped: nothing is lost, no answer changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from schemas.inference import decode_embeddings, decode_fm_request
from schemas.log import Log
from schemas.topics import EMBEDDINGS, FM_REQUESTS, RANKED_RESULTS, RANKING_REQUESTS
from tests.integration import state
from tests.integration.fleet import Worker, until
from tests.integration.installation import ROLES, Installation
from tests.integration.playing import Playing

pytestmark = pytest.mark.timeout(200)


def test_killed_workers_lose_nothing_and_change_nothing(install: Callable[..., Installation], log: Log) -> None:
    here = install(SOLARIS_TRANSPORT__COMMIT_MS="1500")  # so that a kill leaves answers that are not committed
    speculate, infer, serve = here.start(*ROLES)
    playing = Playing(here, log)
    try:
        _kill_between_answer_and_commit(here, serve)
        (serve,) = here.start("serve")
        speculate.kill()
        (speculate,) = here.start("speculate")
        infer.kill()
        (infer,) = here.start("infer")
        serve.kill()
        shutil.rmtree(serve.state)
        (serve,) = here.start("serve")
    finally:
        playing.join()
    here.settle()

    answers = here.answers()
    assert answers.keys() == {(str(r.user_id), str(r.request_id)) for r in log.requests()}
    assert any(len(values) > 1 for values in answers.values()), "no kill fell between an answer and its commit"
    assert {key: values for key, values in answers.items() if len(set(values)) > 1} == {}
    _assert_fm_work_done(here)
    assert here.dead_letters() == []

    assert (speculate.stop(), serve.stop()) == (0, 0)
    _assert_state_of_an_undisturbed_run(here, serve, speculate)


def _kill_between_answer_and_commit(here: Installation, serve: Worker) -> None:
    """Until now each request has one result, so results beyond the committed requests were answered and not committed."""

    def uncommitted() -> int:
        return here.end(RANKED_RESULTS) - here.committed("serve", RANKING_REQUESTS)

    until(lambda: uncommitted() >= 2, 30, "answers that are not committed")
    serve.kill()


def _assert_fm_work_done(here: Installation) -> None:
    """Each pair that was asked for has a vector as new; deadlines are long here, so the only named reason is a newer request."""
    newest: dict[tuple[str, str], int] = {}
    for message in here.read(EMBEDDINGS):
        vectors = decode_embeddings(message.value())
        for item in vectors.items:
            newest[vectors.user, item] = max(newest.get((vectors.user, item), 0), vectors.as_of)
    asked = [decode_fm_request(message.value()) for message in here.read(FM_REQUESTS)]
    pairs = [(request.user, item, request.as_of) for request in asked for item in request.items]
    assert len(pairs) > 100
    assert [pair for pair in pairs if newest.get(pair[:2], 0) < pair[2]] == []


def _assert_state_of_an_undisturbed_run(here: Installation, serve: Worker, speculate: Worker) -> None:
    """A worker that folds the same topics from their start, without any disturbance, has the same rows."""
    now = state.clocks(serve.state, here.bundle)
    disturbed = state.hashes(serve.state, here.bundle, now)
    by_speculate = state.hashes(speculate.state, here.bundle, now, state.SHARED)
    assert by_speculate == state.hashes(serve.state, here.bundle, now, state.SHARED)
    (again,) = here.start("serve:undisturbed")
    here.settle()
    assert again.stop() == 0
    assert state.clocks(again.state, here.bundle) == now
    assert state.hashes(again.state, here.bundle, now) == disturbed
    assert len(set(disturbed)) == len(disturbed), "partitions hold something"

"""Contracts of what we lean on in Faust and aiokafka: a new version that changes one of these is read before it is taken.

When this fails after an upgrade: read the change in the named method, run the transport's tests, then put the new hash in
FAUST_SOURCES (`python -m tests.contracts.test_faust` prints the table).
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import faust
import pytest

from agents.app import SolarisApp
from agents.transport.consumer import BatchConsumer
from agents.transport.driver import BatchTransport
from agents.transport.fetch import BatchConsumerThread
from tests.agents.kafka_log import Log, until, values, workers

from .faust_sources import LEANED_ON, OVERRIDDEN, name, source_hash

FAUST_SOURCES = Path(__file__).with_name("faust_sources.json")
OURS = (BatchConsumer, BatchConsumerThread, SolarisApp)


@pytest.mark.parametrize("method", OVERRIDDEN + LEANED_ON, ids=name)
def test_the_source_is_the_one_that_was_read(method: Any) -> None:
    known = json.loads(FAUST_SOURCES.read_text(encoding="utf-8"))
    assert known.get(name(method)) == source_hash(method), (
        f"{name(method)} changed: read it, then see this file's docstring"
    )


@pytest.mark.parametrize("method", OVERRIDDEN, ids=name)
def test_an_override_takes_the_arguments_of_what_it_overrides(method: Any) -> None:
    for ours in OURS:
        if method.__qualname__.split(".")[0] in {base.__name__ for base in ours.__mro__}:
            mine = getattr(ours, method.__name__)
            if mine is not method:
                assert list(inspect.signature(mine).parameters) == list(inspect.signature(method).parameters)


def test_faust_is_the_pinned_version_and_ours_is_its_transport() -> None:
    assert faust.__version__.startswith("0.15.")
    assert BatchTransport.Consumer is BatchConsumer
    assert BatchConsumer._new_consumer_thread is not BatchConsumer.__mro__[1]._new_consumer_thread  # type: ignore[attr-defined]


@pytest.mark.kafka
@pytest.mark.parametrize("cython", [True, False], ids=["cython", "python"])
def test_the_transport_works_with_and_without_fausts_compiled_modules(broker: Any, cython: bool) -> None:
    """Stream and conductor exist twice in Faust, and the compiled ones inline what can be overridden in the others."""
    environment = {} if cython else {"NO_CYTHON": "1"}
    told = subprocess.run(
        [sys.executable, "-c", "import faust.transport.conductor as c; print(c.ConductorHandler is not None)"],
        capture_output=True, text=True, check=True, env=os.environ | environment, timeout=60,
    )  # fmt: skip
    assert told.stdout.strip() == str(cython)
    log = Log(broker.bootstrap)
    wanted = log.produce(1_000)
    log.put(b"poison", partition=1)
    with workers() as start:
        worker = start(log.options(rows_max=50), **environment)
        assert sorted(values(log.read(log.output, 1_000))) == sorted(wanted)
        until(lambda: log.lag() == 0, what="lag 0")
        assert worker.stop() == 0


if __name__ == "__main__":
    table = {name(method): source_hash(method) for method in OVERRIDDEN + LEANED_ON}
    sys.stdout.write(json.dumps(table, indent=2, sort_keys=True) + "\n")

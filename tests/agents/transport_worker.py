"""A worker process for the transport's tests: echoes each record to an output topic, and tells what happens to it.

    python -m tests.agents.transport_worker '{"bootstrap": …, "group": …, "inputs": [names], "output": name, …}'

One JSON line on stdout per assignment and per closed partition, with offsets; a value of b"poison" raises.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from agents.app import WorkerSettings, run_worker
from agents.kafka import KafkaConfig
from agents.transport.batch import RecordBatch
from agents.transport.partition import InputTopic, PartitionStart
from agents.transport.wiring import TransportConfig
from schemas.errors import FatalError


def say(**what: Any) -> None:
    """One line for the test."""
    sys.stdout.write(json.dumps({"pid": os.getpid(), **what}) + "\n")
    sys.stdout.flush()


class Echo:
    """Sends each record on, with its source's place as a header; keeps no state."""

    def __init__(self, start: PartitionStart, options: Mapping[str, Any]) -> None:
        self._start = start
        self._options = options
        say(event="made", partition=start.partition)

    def positions(self, start: PartitionStart) -> Mapping[str, int | None]:
        committed = {topic: None if held is None else held.offset for topic, held in start.committed.items()}
        marks = {topic: None if held is None else held.mark for topic, held in start.committed.items()}
        say(
            event="assigned",
            partition=start.partition,
            topics=sorted(start.committed),
            committed=committed,
            marks=marks,
        )
        positions: dict[str, int | None] = self._options.get("positions", {})
        return positions

    def process(self, batch: RecordBatch) -> Awaitable[None] | None:
        if self._options.get("say_batches"):
            say(event="batch", topic=batch.topic, partition=batch.partition, rows=len(batch), first=batch.first_offset)
        for index in range(len(batch)):
            value = batch.values[index]
            if value == b"poison":
                raise ValueError("this record is poison")
            if value == b"fatal":
                raise FatalError("the disk is full, says the test")
            place = f"{batch.topic}:{batch.partition}:{int(batch.offsets[index])}".encode()
            self._start.output.send(
                self._options["output"], batch.partition, batch.keys[index], value, (("place", place),)
            )
        if self._options.get("async_s"):
            return asyncio.sleep(self._options["async_s"])
        time.sleep(self._options.get("sleep_s", 0.0))
        return None

    def on_poison(self, batch: RecordBatch, index: int, error: Exception) -> None:
        place = f"{batch.topic}:{batch.partition}:{int(batch.offsets[index])}".encode()
        self._start.output.send(self._options["dead"], 0, place, str(error).encode())

    def mark(self, topic: str) -> str:  # noqa: ARG002 - one output topic, so one mark
        return str(self._start.output.reached(self._options["output"], self._start.partition) or "")

    def close(self) -> None:
        say(event="closed", partition=self._start.partition)


def main() -> int:
    """Run until told to stop."""
    logging.basicConfig(
        level=os.environ.get("LEVEL", "WARNING"), format="%(asctime)s %(process)d %(levelname)s %(name)s %(message)s"
    )
    options = json.loads(sys.argv[1])
    topics = tuple(InputTopic(name, batch_rows_max=options.get("rows_max", 5_000)) for name in options["inputs"])
    config = dataclasses.replace(TransportConfig(), **options.get("transport", {}))
    settings = WorkerSettings(options["group"], topics, KafkaConfig(bootstrap=options["bootstrap"]), config)
    try:
        code = run_worker(settings, lambda start: Echo(start, options))
    except Exception as error:
        say(event="refused", error=str(error), kind=type(error).__name__)
        raise
    say(event="ended", code=code)
    return code


if __name__ == "__main__":
    sys.exit(main())

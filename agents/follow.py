"""While a worker runs: the catalogue is followed, and its bad records get their dead letters.

In: the catalogue, the partitions here with their stores. Out: items in the index; dead letters of `items`. Never: two processors'
work at once (everything that touches an index or a store runs in the event loop, between their calls).

Every process reads all of `items`, so somebody must own its dead letters: the speculate worker that has partition p of the other
topics writes those of items' partitions q with q % partitions = p. How far it came is a stamp in p's store. A worker that gets p
without that store begins at the topic's start again, so a letter may be there twice, with the same key.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from confluent_kafka import Message, Producer

from agents.catalogue import Catalogue, record_bytes
from agents.kafka import KafkaConfig, librdkafka_settings
from schemas.deadletters import dead_letter
from schemas.errors import BadRecord
from schemas.topics import DEAD_LETTERS, ITEMS
from streams.state.store import Store, Transaction

log = logging.getLogger("solaris.catalogue")

INTERVAL_S = 0.1
FLUSH_S_MAX = 10.0
LETTERS_MAX = 10_000
"""Bad items that a process remembers for the time when it becomes their owner; the oldest are forgotten first, and counted."""


class Keeper(Protocol):
    """A partition's processor, as far as it matters here."""

    @property
    def store(self) -> Store: ...


_Letter = tuple[int, int, bytes, bytes]  # items' partition, offset, key, value


class ItemLetters:
    """The dead letters of `items` that one process has seen reason for."""

    def __init__(self, kafka: KafkaConfig, partitions: int) -> None:
        self._kafka, self._partitions = kafka, partitions
        self._kept: OrderedDict[tuple[int, int], _Letter] = OrderedDict()
        self._producer: Producer | None = None
        self.written = self.forgotten = 0

    def refuse(self, message: Message, error: BadRecord) -> None:
        """A bad record of `items`; see `Catalogue`."""
        number, offset, append_ms = message.partition() or 0, message.offset() or 0, message.timestamp()[1]
        key, value = dead_letter(
            self._kafka.topic(ITEMS), number, offset, append_ms,
            record_bytes(message.key()), record_bytes(message.value()), error,
        )  # fmt: skip
        self._kept[number, offset] = (number, offset, key, value)
        if len(self._kept) > LETTERS_MAX:
            self._kept.popitem(last=False)
            self.forgotten += 1

    async def write(self, processors: Mapping[int, Keeper]) -> None:
        """Write what the partitions here owe, wait until the broker has it, then stamp it."""
        for partition, processor in list(processors.items()):
            if processors.get(partition) is not processor:  # it went while another's letters were on their way
                continue
            due = self._due(partition, processor.store)
            if not due or not await self._sent(due):
                continue
            self.written += len(due)
            if processors.get(partition) is processor:  # still here after the wait
                txn = Transaction(processor.store)
                for number, offset, _, _ in due:
                    txn.stamp(_stamp(number), offset + 1)
                processor.store.commit(txn)

    def _due(self, partition: int, store: Store) -> list[_Letter]:
        return [
            letter
            for letter in self._kept.values()
            if letter[0] % self._partitions == partition and letter[1] >= (store.stamp(_stamp(letter[0])) or 0)
        ]

    async def _sent(self, letters: list[_Letter]) -> bool:
        if self._producer is None:
            self._producer = Producer(librdkafka_settings(self._kafka) | {"acks": "all", "enable.idempotence": True})
        failed: list[object] = []
        for number, _, key, value in letters:
            self._producer.produce(
                self._kafka.topic(DEAD_LETTERS), value, key, number % self._partitions,
                on_delivery=lambda error, _message: failed.append(error) if error is not None else None,
            )  # fmt: skip
        left = await asyncio.get_running_loop().run_in_executor(None, self._producer.flush, FLUSH_S_MAX)
        if left or failed:
            log.warning("%d dead letters of items were not acknowledged; they are sent again", left + len(failed))
        return not left and not failed


async def follow(catalogue: Catalogue, letters: ItemLetters | None, processors: Mapping[int, Keeper]) -> None:
    """Apply what comes to the catalogue for as long as the worker runs. `letters` None: another process owns them."""
    while True:
        catalogue.poll(0)
        if letters is not None:
            await letters.write(processors)
        await asyncio.sleep(INTERVAL_S)


def _stamp(number: int) -> str:
    return f"{ITEMS.name}@{number}"

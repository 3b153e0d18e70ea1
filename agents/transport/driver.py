"""The Faust transport: aiokafka's driver with our consumer, and no producer.

In: Faust's app. Out: consumers. Never: an output; those go through `Output`, Faust's own producer is not even connected.
"""

from __future__ import annotations

from typing import Any, ClassVar

from faust.transport.drivers.aiokafka import Producer, Transport

from .consumer import BatchConsumer


class NoProducer(Producer):
    """Faust wants a producer; this one never connects."""

    async def on_start(self) -> None:
        """Nothing to start."""

    async def on_stop(self) -> None:
        """Nothing to stop."""

    async def flush(self) -> None:
        """Nothing is ever sent."""


class BatchTransport(Transport):
    """aiokafka's transport whose consumer hands over record batches."""

    Consumer: ClassVar[Any] = BatchConsumer
    Producer: ClassVar[Any] = NoProducer

"""A partition's clock: the largest valid event time that was applied. Never the wall clock, never going back.

In: the `ts` of each batch. Out: `now`, UTC ms. It is soft state: kept with the rows so that a restart does not make time go back.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from streams.state.store import Reader, Transaction

_KEY = b"clock"
_LAYOUT = struct.Struct("<q")


class PartitionClock:
    """`now` is 0 until the first `ts`."""

    def __init__(self, now: int = 0) -> None:
        self.now = now

    @classmethod
    def load(cls, reader: Reader) -> PartitionClock:
        """The clock as it was last saved, or one at 0."""
        (value,) = reader.get("soft", [_KEY])
        return cls(_LAYOUT.unpack(value)[0] if value else 0)

    def save(self, txn: Transaction) -> None:
        """Keep the time with the batch's rows."""
        txn.put("soft", _KEY, _LAYOUT.pack(self.now))

    def advance(self, ts: npt.NDArray[np.int64]) -> int:
        """Apply the event times of a batch, int64 [n] in UTC ms in any order; returns `now`."""
        if len(ts):
            self.now = max(self.now, int(ts.max()))
        return self.now

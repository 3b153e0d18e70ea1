"""RecordBatch: the records of one poll of one partition, as parallel columns.

In: what the consumer thread unpacked. Out: the columns, slices, single records. Never: a decoded value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Headers = tuple[tuple[str, bytes | None], ...]


class Record(NamedTuple):
    """One record of a batch, for dead letters and messages. `append_ts_ms` is the Kafka record's time."""

    topic: str
    partition: int
    offset: int
    append_ts_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True, slots=True, eq=False)
class RecordBatch:
    """n ≥ 1 records of one partition in offset order.

    `next_offset` is the position after the batch, so offsets that compaction or transactions left out are counted in; stamp
    a fold with it. `append_ts_ms` int64[n] is the Kafka record's time in ms; `log_append_time` says whether the broker set it.
    """

    topic: str
    partition: int
    offsets: npt.NDArray[np.int64]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    append_ts_ms: npt.NDArray[np.int64]
    log_append_time: bool
    headers: Sequence[Headers]
    next_offset: int

    def __len__(self) -> int:
        return len(self.values)

    @property
    def first_offset(self) -> int:
        """The offset of the first record."""
        return int(self.offsets[0])

    def slice(self, start: int, stop: int) -> RecordBatch:
        """Records [start, stop), 0 ≤ start < stop ≤ n, as a batch of its own, ending where the next record begins."""
        next_offset = self.next_offset if stop >= len(self) else int(self.offsets[stop])
        return RecordBatch(
            self.topic,
            self.partition,
            self.offsets[start:stop],
            self.keys[start:stop],
            self.values[start:stop],
            self.append_ts_ms[start:stop],
            self.log_append_time,
            self.headers[start:stop],
            next_offset,
        )

    def record(self, index: int) -> Record:
        """The record at `index`."""
        return Record(
            self.topic,
            self.partition,
            int(self.offsets[index]),
            int(self.append_ts_ms[index]),
            self.keys[index],
            self.values[index],
            self.headers[index],
        )

    def __repr__(self) -> str:
        return (
            f"RecordBatch({self.topic}-{self.partition} [{self.first_offset}, {self.next_offset}), {len(self)} records)"
        )

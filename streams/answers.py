"""Answers: the results of the last ten minutes as they were sent, so that a repeated request gets the same bytes again.

In: encoded results, as they are sent or as they are read back from ranked-results after a restart. Out: the bytes for a known
(user, request id). Never: an answer that was made again; past `bytes_max` the oldest are forgotten and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from schemas.ranking import RankedResult

_OVERHEAD_BYTES = 300
"""What an entry costs beside its bytes, so that `bytes_max` holds for empty results too."""


class Answers:
    """Judged by event time: an answer stands while now - its ts < `window_ms`.

    After a crash the records past the last commit come again, and the clock may have run far ahead of them meanwhile. Their answers
    (`expect`) stand whatever their age, until all of those records have come.
    """

    def __init__(self, bytes_max: int, window_ms: int) -> None:
        self.bytes_max, self.window_ms = bytes_max, window_ms
        self.forgotten_early = 0
        """Answers that had to go while they still stood: a repeat of those is ranked anew."""
        self.bytes = 0
        self._kept: OrderedDict[tuple[str, str], tuple[int, bytes]] = OrderedDict()
        self._expected: dict[tuple[str, str], bytes] = {}
        self._expected_below = 0

    def __len__(self) -> int:
        return len(self._kept)

    def expect(self, results: Iterable[tuple[RankedResult, bytes]], offset_below: int) -> None:
        """Results that may answer requests which come again: records below this offset. Of two for one request the first stands."""
        self._expected, self._expected_below = {}, offset_below
        for result, encoded in results:
            self._expected.setdefault((result.user_id, result.request_id), encoded)

    def find(self, user: str, request_id: str, now: int, offset: int) -> bytes | None:
        """The bytes that were sent, None where there are none or they are too old. `offset`: of the request's record."""
        if self._expected and offset >= self._expected_below:
            self._expected.clear()
        if (user, request_id) in self._expected:
            return self._expected[user, request_id]
        found = self._kept.get((user, request_id))
        return found[1] if found and now - found[0] < self.window_ms else None

    def keep(self, result: RankedResult, encoded: bytes) -> None:
        """Keep a result that was just made, in place of one that no longer stands."""
        self._put(result, encoded)
        self._bound(result.ts)

    def remember(self, results: Iterable[tuple[RankedResult, bytes]]) -> None:
        """Results read back from the topic, in any order. Of two for one request the earlier stands, as it does for clients."""
        for result, encoded in results:
            known = self._kept.get((result.user_id, result.request_id))
            if known is None or 0 < known[0] - result.ts < self.window_ms or result.ts - known[0] >= self.window_ms:
                self._put(result, encoded)
        self._kept = OrderedDict(sorted(self._kept.items(), key=lambda entry: entry[1][0]))
        if self._kept:
            self._bound(next(reversed(self._kept.values()))[0])

    def _put(self, result: RankedResult, encoded: bytes) -> None:
        key = (result.user_id, result.request_id)
        self._drop(key)
        self._kept[key] = (result.ts, encoded)
        self.bytes += len(encoded) + _OVERHEAD_BYTES

    def _bound(self, now: int) -> None:
        """Forget from the oldest what no longer stands, and what does not fit."""
        while self._kept:
            key, (ts, _) = next(iter(self._kept.items()))
            standing = now - ts < self.window_ms
            if standing and self.bytes <= self.bytes_max:
                return
            self.forgotten_early += standing
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        found = self._kept.pop(key, None)
        if found:
            self.bytes -= len(found[1]) + _OVERHEAD_BYTES

"""Training rows from a replay: what the ranker saw, what the FM would have seen, and what came of it.

In: the pipeline's requests as they are ranked. Out: columns in time order (`Features`, `Vectors`, labels, `FmRows`), so coverage,
ages and misses in training are those of serving. Never looks at anything later than the request that it records.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from models.features import F32, I32, I64, Features, Vectors
from models.ranker import RankerLike
from models.rows import FmRows
from schemas.errors import UsageError
from schemas.log import LoggedRequest
from schemas.ranking import CheckedRequest
from streams.items import ItemIndex
from streams.serve import Serve
from streams.snapshot import snapshot

F64 = npt.NDArray[np.float64]


class Recorder:
    """Stands where the ranker stands: keeps what it is shown, scores with `ranker` once there is one, else with zeros."""

    def __init__(self, item_dims: int = 8) -> None:
        self.ranker: RankerLike | None = None
        self._item_dims = item_dims
        self.features: list[Features] = []
        self.vectors: list[Vectors] = []

    def score(self, features: Features, vectors: Vectors | None = None) -> F64:
        """Keep both; the replay's order of items does not matter, so no ranker is run here."""
        assert vectors is not None, "serve always says which vectors there were"
        self.features.append(features)
        self.vectors.append(vectors)
        return np.zeros(len(features.request))

    def score_many(self, features: Features, vectors: Vectors | None = None) -> F64:
        """The verifier's question: the present ranker's answer, one half before there is one."""
        if self.ranker is None:
            return np.full(len(features.request), 0.5)
        return self.ranker.score_many(features, vectors)

    def item_vectors(self, bucket: I32, category: I32, content: F32) -> F32:
        """Ranker space; zeros (which neighbours refuse) before there is a ranker."""
        if self.ranker is None:
            return np.zeros((len(bucket), self._item_dims), np.float32)
        return self.ranker.item_vectors(bucket, category, content)


class Collector:
    """Collects the rows of one partition's requests; `tasks` is 1 or 2 (with the log's second label)."""

    def __init__(self, index: ItemIndex, recorder: Recorder, tasks: int) -> None:
        self._index, self._recorder, self._tasks = index, recorder, tasks
        self._ts: list[int] = []
        self._past: list[tuple[I32, npt.NDArray[np.uint8], I64]] = []
        self._items: list[I32] = []
        self._labels: list[F32] = []

    def __len__(self) -> int:
        return len(self._ts)

    def before(self, serve: Serve, requests: Sequence[CheckedRequest], logged: Sequence[LoggedRequest]) -> None:
        """Take histories and outcomes of requests that are about to be ranked."""
        chosen = [(asked, line) for asked, line in zip(requests, logged, strict=True) if asked.candidates]
        users, tables = [asked.user for asked, _ in chosen], serve.tables
        both = zip(tables.history.read(serve.store, users), tables.shown.read(serve.store, users), strict=True)
        for (asked, line), (history, shown) in zip(chosen, both, strict=True):
            past = snapshot(history, shown)
            now = max(asked.ts, serve.clock.now)
            self._ts.append(now)
            self._past.append((self._index.intern(past.items), past.types, np.maximum(now - past.ts, 0)))
            self._items.append(self._index.intern(asked.candidates))
            self._labels.append(_labels(asked, line, self._tasks))

    def columns(self) -> tuple[Features, Vectors, F32]:
        """Everything that the ranker was shown so far: features, vectors, labels float32 [n, tasks]."""
        features, vectors = _join_features(self._recorder.features), _join_vectors(self._recorder.vectors)
        labels = np.concatenate(self._labels)
        if len(labels) != len(features.request) or len(self._ts) != len(features.user_bucket):
            raise UsageError(
                f"{len(self._ts)} requests were replayed and {len(features.user_bucket)} ranked: a request_id repeats within "
                "10 minutes of one user; give each request an id of its own"
            )
        return features, vectors, labels

    def fm_rows(self, first: int = 0, last: int | None = None) -> FmRows:
        """The requests [first, last) as the FM's rows."""
        chosen = slice(first, last)
        past, items = self._past[chosen], self._items[chosen]
        shape = (len(past), max([len(rows) for rows, _, _ in past], default=0))
        item, types, ages = np.full(shape, -1, np.int32), np.zeros(shape, np.uint8), np.zeros(shape, np.int64)
        for row, (rows, kinds, age) in enumerate(past):
            item[row, : len(rows)], types[row, : len(rows)], ages[row, : len(rows)] = rows, kinds, age
        request = np.repeat(np.arange(len(items), dtype=np.int32), [len(rows) for rows in items])
        index = self._index
        dense = np.concatenate([part.dense for part in self._recorder.features])
        before = sum(len(rows) for rows in self._items[:first])
        return FmRows(
            np.maximum.accumulate(np.array(self._ts[chosen], np.int64)) if past else np.zeros(0, np.int64),
            item, types, ages, request,
            np.concatenate(items) if items else np.zeros(0, np.int32),
            np.concatenate(self._labels[chosen]) if items else np.zeros((0, self._tasks), np.float32),
            index.bucket.copy(), index.category.copy(), index.content.copy(), dense[before : before + len(request)],
        )  # fmt: skip

    def first_at(self, ts: int) -> int:
        """Number of the first request at or after `ts`."""
        return int(np.searchsorted(np.maximum.accumulate(np.array(self._ts, np.int64)), ts)) if self._ts else 0


def _labels(asked: CheckedRequest, line: LoggedRequest, tasks: int) -> F32:
    """float32 [candidates, tasks] in the order of the checked candidates; NaN where the log has no second label."""
    place = {str(item): at for at, item in reversed(list(enumerate(line.candidates)))}
    order = [place[item] for item in asked.candidates]
    found = np.full((len(order), tasks), np.nan, np.float32)
    found[:, 0] = [line.labels[at] for at in order]
    if tasks > 1 and line.labels2 is not None:
        found[:, 1] = [line.labels2[at] for at in order]
    return found


def _join_features(parts: Sequence[Features]) -> Features:
    if not parts:
        raise UsageError("no request was replayed; the log has none in the training window")
    starts = np.cumsum([0, *(len(part.user_bucket) for part in parts)])[:-1]
    request = np.concatenate([part.request + start for part, start in zip(parts, starts, strict=True)])
    names = [name for name in Features.__slots__ if name != "request"]
    return Features(request.astype(np.int32), **{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})


def _join_vectors(parts: Sequence[Vectors]) -> Vectors:
    return Vectors(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in Vectors.__slots__})

"""Random little logs for the folds: few users and items, times that crowd around the edges of panes and windows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from schemas.events import EventBatch
from schemas.inference import Embeddings
from tests.oracles.folds import HOUR_MS, LoggedEvent, LoggedVector

BASE = 1_700_000_000_000 // HOUR_MS * HOUR_MS
DIMENSIONS = 3

quick = settings(max_examples=50, deadline=None)
"""For every property here: bounded work, and no failure because the machine was busy."""

users = st.sampled_from(["u", "u", "u", "u:1", "ü", "1"])
items = st.sampled_from(["a", "b", "naïve", "a:b", "c\x00d", "e", "f"])
times = st.builds(
    lambda hour, edge: BASE + hour * HOUR_MS + edge,
    st.integers(-60, 60),
    st.sampled_from([-1, 0, 1, 599_999, 600_000, HOUR_MS // 2]),
)
shuffled = st.lists(st.builds(LoggedEvent, users, items, st.sampled_from([1, 1, 2, 3, 6, 40]), times), max_size=40)
events = shuffled | shuffled.map(
    lambda log: sorted(log, key=lambda event: event.ts)
)  # as late as can be, or not at all

vectors = st.lists(
    st.builds(
        LoggedVector,
        users,
        st.sampled_from([0, 7, 2**64 - 1]),
        items,
        times,
        st.floats(0.0009765625, 10.0, width=32),
        st.tuples(*[st.integers(-127, 127)] * DIMENSIONS),
    ),
    max_size=30,
)
cuts = st.sets(st.integers(0, 40), max_size=6)


def pieces(length: int, where: set[int]) -> Iterator[slice]:
    """The log's slices between the cuts."""
    edges = [0, *sorted(cut for cut in where if 0 < cut < length), length]
    yield from itertools.starmap(slice, itertools.pairwise(edges))


def event_batch(log: Sequence[LoggedEvent], piece: slice = slice(None)) -> EventBatch:
    """Events of a piece as a batch; offsets are places in the whole log."""
    part = log[piece]
    return EventBatch(
        0,
        np.arange(len(log), dtype=np.int64)[piece],
        np.array([event.ts for event in part], np.int64),
        np.array([event.ts for event in part], np.int64),
        [event.user for event in part],
        [event.item for event in part],
        np.array([event.kind for event in part], np.uint8),
    )


def messages(log: Sequence[LoggedVector], piece: slice = slice(None)) -> list[Embeddings]:
    """Vectors as messages: neighbours of one user, space and as_of share one, as the wire has it."""
    found = []
    for (user, space, as_of), group in itertools.groupby(log[piece], lambda v: (v.user, v.space, v.as_of)):
        part = list(group)
        scales = np.array([vector.scale for vector in part], np.float32)
        codes = np.array([vector.code for vector in part], np.int8)
        found.append(Embeddings(user, space, as_of, -1, [vector.item for vector in part], scales, codes))
    return found

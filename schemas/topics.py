"""The topics, in one table: what each is keyed by, how it is written, and how long it is kept.

Inner topics take the partition of their input by number, so every co-partitioned topic has the same count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """One topic: name without the prefix, key, format, retention in ms (None = keep by compaction alone)."""

    name: str
    key: Literal["user", "item", "source"]
    format: Literal["json", "binary"]
    retention_ms: int | None
    compacted: bool = False
    copartitioned: bool = True


EVENTS = TopicSpec("events", "user", "json", 90 * _DAY_MS)
ITEMS = TopicSpec("items", "item", "json", None, compacted=True, copartitioned=False)
FM_REQUESTS = TopicSpec("fm-requests", "user", "binary", 6 * _HOUR_MS)
EMBEDDINGS = TopicSpec("embeddings", "user", "binary", 3 * _DAY_MS)
RANKING_REQUESTS = TopicSpec("ranking-requests", "user", "json", 7 * _DAY_MS)
RANKED_RESULTS = TopicSpec("ranked-results", "user", "json", 7 * _DAY_MS)
DEAD_LETTERS = TopicSpec("dead-letters", "source", "json", 90 * _DAY_MS, copartitioned=False)

TOPICS: tuple[TopicSpec, ...] = (
    EVENTS,
    ITEMS,
    FM_REQUESTS,
    EMBEDDINGS,
    RANKING_REQUESTS,
    RANKED_RESULTS,
    DEAD_LETTERS,
)

"""The three consumer groups, and which topics each of them reads and must finish."""

from __future__ import annotations

from agents.kafka import KafkaConfig
from agents.lag import Lag
from schemas.topics import EMBEDDINGS, EVENTS, FM_REQUESTS, RANKED_RESULTS, RANKING_REQUESTS, TopicSpec

GROUP_TOPICS: dict[str, tuple[TopicSpec, ...]] = {
    "speculate": (EVENTS, RANKED_RESULTS, EMBEDDINGS),
    "infer": (FM_REQUESTS,),
    "serve": (EVENTS, EMBEDDINGS, RANKING_REQUESTS),
}


def group_id(kafka: KafkaConfig, role: str) -> str:
    """The group's name on the cluster; it carries the topic prefix, so that two installations never share a group."""
    return f"{kafka.topic_prefix}{role}"


def group_topics(kafka: KafkaConfig, role: str) -> list[str]:
    """Full names of the topics that the group reads, in the table's order."""
    return [kafka.topic(spec) for spec in GROUP_TOPICS[role]]


def worker_lag(kafka: KafkaConfig) -> Lag:
    """The lag of all three groups together."""
    return Lag(kafka, {group_id(kafka, role): group_topics(kafka, role) for role in GROUP_TOPICS})

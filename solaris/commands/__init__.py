"""One file per verb; what they share is here. See solaris/cli.py for how a file becomes a verb."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from schemas.errors import TopicError
from solaris.config import Config, load

if TYPE_CHECKING:
    from agents.kafka import KafkaConfig
    from schemas.topics import TopicSpec


def config(ctx: typer.Context, **flags: Any) -> Config:
    """All settings; `flags` are the verb's own options by field, such as `kafka__bootstrap=…` (None = not given)."""
    return _load(ctx, None, flags)


def kafka_config(ctx: typer.Context, bootstrap: str | None) -> KafkaConfig:
    """The section [kafka] alone: a client need not import what the workers' sections lie in."""
    from agents.kafka import KafkaConfig

    return _load(ctx, ("kafka",), {"kafka__bootstrap": bootstrap}).get(KafkaConfig)


def _load(ctx: typer.Context, only: tuple[str, ...] | None, flags: Mapping[str, Any]) -> Config:
    given = ctx.find_root().obj or {}
    named = [f"{name.replace('__', '.', 1)}={value}" for name, value in flags.items() if value is not None]
    return load(given.get("config"), os.environ, [*given.get("overrides", ()), *named], only=only)


def require_topics(kafka: KafkaConfig, *specs: TopicSpec) -> None:
    """Raise `TopicError` unless Kafka answers and has these topics: said at once, not after a client's timeouts."""
    from agents.kafka import TopicAdmin

    there = TopicAdmin(kafka).partitions()
    missing = [kafka.topic(spec) for spec in specs if kafka.topic(spec) not in there]
    if missing:
        raise TopicError(f"Missing: {', '.join(missing)}; create them with `solaris topics create`.")


def emit(facts: Mapping[str, Any], sentence: str, *, as_json: bool) -> None:
    """Print a result for a script (one JSON line) or for a person (a sentence)."""
    print(json.dumps(facts) if as_json else sentence, flush=True)

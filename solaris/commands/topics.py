"""Create, list and check the topics that Solaris needs."""

from __future__ import annotations

from typing import Annotated

import typer

from agents.kafka import TopicAdmin, check_copartitioning
from schemas.errors import TopicError
from schemas.topics import TOPICS
from solaris.commands import emit, kafka_config

app = typer.Typer(
    no_args_is_help=True,
    help="""Create, list and check the topics that Solaris needs.

    Examples:

        solaris topics create --partitions 8
        solaris topics check --json
        solaris --set kafka.bootstrap=kafka-1:9092 topics list

    Exit codes: 0 done, 1 topics are missing or disagree, or Kafka does not answer, 2 a wrong call or setting.
    """,
)

Bootstrap = Annotated[str | None, typer.Option(help="host:port of Kafka, several with commas.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON line instead of a table.")]


@app.command()
def create(
    ctx: typer.Context,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Partitions of every topic; default: as they are, or 4.")
    ] = None,
    bootstrap: Bootstrap = None,
    as_json: AsJson = False,
) -> None:
    """Create what is missing and leave what is there as it is; doing it twice is fine."""
    kafka = kafka_config(ctx, bootstrap)
    there = TopicAdmin(kafka).ensure(partitions=partitions)
    emit({"topics": there}, _table(there), as_json=as_json)


@app.command("list")
def list_(ctx: typer.Context, bootstrap: Bootstrap = None, as_json: AsJson = False) -> None:
    """Show which of our topics are there, and their partitions."""
    kafka = kafka_config(ctx, bootstrap)
    there = TopicAdmin(kafka).partitions()
    emit({"topics": there}, _table(there) or f"None of ours ({kafka.topic_prefix}*) yet.", as_json=as_json)


@app.command()
def check(ctx: typer.Context, bootstrap: Bootstrap = None, as_json: AsJson = False) -> None:
    """Fail unless every topic is there and all co-partitioned ones have one partition count."""
    kafka = kafka_config(ctx, bootstrap)
    there = TopicAdmin(kafka).partitions()
    missing = [kafka.topic(spec) for spec in TOPICS if kafka.topic(spec) not in there]
    if missing:
        raise TopicError(f"Missing: {', '.join(missing)}; create them with `solaris topics create`.")
    count = check_copartitioning(kafka, TOPICS, there)
    emit(
        {"topics": there, "partitions": count}, f"All {len(there)} topics are there and fit together.", as_json=as_json
    )


def _table(there: dict[str, int]) -> str:
    return "\n".join(f"{name:<40} {count:>4} partitions" for name, count in there.items())

"""Ask for one ranking and print the result."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import typer

from schemas.topics import RANKED_RESULTS, RANKING_REQUESTS
from solaris.commands import kafka_config, require_topics

HELP = """Ask for one ranking and print the result.

Examples:

    solaris rank user42 item1 item2 item3
    solaris rank user42 item1 item2 --ts 1780000000000 --json

Exit codes: 0 a result came, 1 none came in time, topics are missing or Kafka does not answer, 2 a wrong call or setting.
"""

app = typer.Typer()


@app.command(help=HELP)
def rank(
    ctx: typer.Context,
    user: Annotated[str, typer.Argument(help="User id.")],
    items: Annotated[list[str], typer.Argument(help="Candidate item ids, up to 1,000.")],
    ts: Annotated[int | None, typer.Option(help="Event time, UTC ms; default: now.")] = None,
    deadline_ms: Annotated[int | None, typer.Option(min=1, help="After this a fallback order is sent.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for the result.")] = 10.0,
    bootstrap: Annotated[str | None, typer.Option(help="host:port of Kafka, several with commas.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result's JSON as it is on the topic.")] = False,
) -> None:
    """Send one ranking request and wait for its result."""
    from agents.results import rank as ask

    kafka = kafka_config(ctx, bootstrap)
    require_topics(kafka, RANKING_REQUESTS, RANKED_RESULTS)
    answer = ask(kafka, user, items, ts=ts, deadline_ms=deadline_ms, timeout_s=timeout_s)
    if as_json:
        print(json.dumps(msgspec.to_builtins(answer.result)), flush=True)
        return
    for place, item in enumerate(answer.result.items, start=1):
        age = "" if item.age_ms is None else f"{item.age_ms / 60_000:8.1f} min old"
        score = "not finite" if item.score is None else f"{item.score:.4f}"
        print(f"{place:>4}  {item.item_id:<40} {score:>10}  {item.tier:<8} {age}")
    flags = f"; {', '.join(answer.result.flags)}" if answer.result.flags else ""
    print(f"{answer.latency_ms:.1f} ms{flags}", flush=True)

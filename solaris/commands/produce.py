"""Play an event log onto the topics, live."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from schemas.errors import SolarisError
from schemas.topics import EVENTS, ITEMS, RANKING_REQUESTS
from solaris.commands import emit, kafka_config, require_topics
from solaris.progress import PlayProgress

HELP = """Play an event log onto the topics, live.

Sends the catalogue, then events and ranking requests in the order of their `ts`. Outcomes in the log are never sent.
Says every five seconds how far it is.

With --hold-back each of a user's requests waits until serve has folded what the user did before, and each event until the
requests before it are answered. Serve says so by its commits, so workers with a small [transport] commit_ms, such as 50, make
it faster.

Examples:

    solaris produce logs/taobao --speed 3600
    solaris produce logs/demo --hold-back --from-ts 1780000000000 --json

Exit codes: 0 every record is acknowledged, 1 some are not (the count is printed), topics are missing or Kafka does not
answer, 2 a wrong call or setting.
"""

app = typer.Typer()


@app.command(help=HELP)
def produce(
    ctx: typer.Context,
    log: Annotated[Path, typer.Argument(help="A log folder, from `solaris import` or `solaris generate`.")],
    speed: Annotated[float, typer.Option(min=0, help="Event time over wall time; 0 = as fast as it goes.")] = 0.0,
    from_ts: Annotated[int, typer.Option(help="First event time, UTC ms.")] = 0,
    to_ts: Annotated[int, typer.Option(help="End of event time, UTC ms, exclusive.", show_default="the end")] = 2**62,
    hold_back: Annotated[bool, typer.Option("--hold-back", help="Wait while the workers lag.")] = False,
    ahead_ms: Annotated[
        int, typer.Option(min=1, help="With --hold-back: event time that the workers finish before more is sent.")
    ] = 300_000,
    catalogue: Annotated[bool, typer.Option(help="Send the items first.")] = True,
    bootstrap: Annotated[str | None, typer.Option(help="host:port of Kafka, several with commas.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line instead of a sentence.")] = False,
) -> None:
    """Send a log's items, events and requests."""
    from agents.groups import worker_lag
    from agents.player import Player
    from schemas.log import Log

    kafka = kafka_config(ctx, bootstrap)
    source = Log(log)
    require_topics(kafka, EVENTS, RANKING_REQUESTS, *([ITEMS] if catalogue else []))
    lag = worker_lag(kafka) if hold_back else None
    player = Player(kafka, speed=speed, lag=lag, ahead_ms_max=ahead_ms, on_progress=PlayProgress())
    if catalogue:
        player.catalogue(source)
    played = player.play(source, from_ts, to_ts)
    emit(
        asdict(played),
        f"{played.events:,} events, {played.requests:,} requests and {played.items:,} items sent; "
        f"{played.undelivered:,} not acknowledged.",
        as_json=as_json,
    )
    if played.undelivered:
        raise SolarisError(f"{played.undelivered} records were not acknowledged: {played.errors}; send the span again")

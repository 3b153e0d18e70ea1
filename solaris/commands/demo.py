"""The whole path on this machine: Kafka, a log, training, three workers, a live playback, a summary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """The whole path on this machine: Kafka, a log, training, three workers, a live playback, a summary.

Nothing here is special to the demo: it calls `broker`, `import` or `generate`, `train`, `topics`, `worker` and `produce`.
The last line is JSON.

Examples:

    solaris demo
    solaris demo --log UserBehavior.csv.gz
    solaris demo --log logs/mine --played 0.1 --keep

Exit codes: 0 every request has its result, 1 something failed (the sentence says what), 2 a wrong call or setting.
"""

app = typer.Typer()


@app.command(help=HELP)
def demo(
    log: Annotated[Path | None, typer.Option(help="A log folder, or a file that `solaris import` reads.")] = None,
    out: Annotated[Path, typer.Option(help="Where the log, the bundle, the state and the broker live.")] = Path(
        ".solaris/demo"
    ),
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of the topics.")] = 4,
    played: Annotated[float, typer.Option(help="Share of the requests, at the log's end, that is played live.")] = 0.25,
    ttl: Annotated[str, typer.Option(help="How long a vector counts.")] = "24h",
    pairs_per_ranked: Annotated[float, typer.Option(min=0.0, help="FM pairs per ranked pair.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Seed of the generator and of training.")] = 1,
    bundle: Annotated[Path | None, typer.Option(help="A bundle to serve with, instead of training one.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the folder; else an earlier run's is replaced.")] = False,
) -> None:
    """Run the demo; the last line on stdout is the summary as JSON."""
    from solaris.demo import DemoConfig, run_demo

    run_demo(DemoConfig(log, out, partitions, played, ttl, pairs_per_ranked, seed, keep, bundle))

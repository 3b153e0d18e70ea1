"""Import an event log: Taobao UserBehavior, OTTO, MovieLens, or a CSV, JSON-lines or Parquet table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from schemas.log import LogManifest
from solaris.commands import emit

app = typer.Typer()


@app.command()
def import_log(
    path: Annotated[Path, typer.Argument(help="The file (also gzipped), or MovieLens' folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the log; new or empty.")],
    format_: Annotated[
        str | None, typer.Option("--format", help="taobao, otto, movielens, csv, jsonl or parquet; else detected.")
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="OURS=THEIRS", help="A table's column: user_id=uid; may be repeated."),
    ] = None,
    constant: Annotated[
        list[str] | None, typer.Option(metavar="OURS=VALUE", help="The same in every row: event_type=click.")
    ] = None,
    ts_unit: Annotated[str, typer.Option(help="Unit of a table's ts: s, ms, us or iso (no zone = UTC).")] = "ms",
    construct: Annotated[bool, typer.Option(help="Make requests up for a log that has no impressions.")] = True,
    candidates: Annotated[int, typer.Option(help="Candidates of a constructed request, at most.")] = 15,
    every: Annotated[int, typer.Option(help="A constructed request every so many events of a session.")] = 5,
    unseen: Annotated[
        str, typer.Option(help="keep or drop positives whose item nobody had touched before the request.")
    ] = "keep",
    seed: Annotated[int, typer.Option(help="Seed of constructed requests.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace a log that is in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line instead of sentences.")] = False,
) -> None:
    """Turn somebody's events into a log folder; rows that can't be used are dropped, counted and named.

    A log with impressions keeps its own requests. For any other, requests are constructed: what could have been ranked just
    before the user acted (solaris/importers/construct.py states the policy), and log.json says so.

    Examples:

        solaris import UserBehavior.csv.gz --out logs/taobao
        solaris import ml-100k --out logs/ml
        solaris import clicks.parquet --out logs/mine --map user_id=uid --map item_id=sku --map ts=time --ts-unit s
        solaris import views.csv --out logs/views --constant event_type=view --ts-unit iso

    Exit codes: 0 done, 1 the disk failed, 2 the file, a column or an option is not what it should be.
    """
    from solaris.importers.construct import ConstructConfig
    from solaris.importers.importer import ImportOptions
    from solaris.importers.importer import import_log as run
    from solaris.importers.progress import bar
    from solaris.importers.table import TableOptions, name_values

    options = ImportOptions(
        format=format_,
        table=TableOptions(name_values(map_ or []), name_values(constant or []), ts_unit),
        construct=ConstructConfig(candidates=candidates, every=every, unseen=unseen, seed=seed),
        constructed=construct,
        force=force,
    )
    with bar("importing") as progress:
        manifest = run(path, out, options, progress)
    emit({"log": str(out)} | msgspec.to_builtins(manifest), _sentences(out, manifest), as_json=as_json)


def _sentences(out: Path, manifest: LogManifest) -> str:
    dropped = sum(manifest.dropped.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in manifest.dropped.items())
    left = f"Dropped {dropped} rows: {reasons}." if dropped else "Dropped nothing."
    kind = "constructed requests" if manifest.constructed else "requests"
    return (
        f"{out}: {manifest.events} events, {manifest.requests} {kind}, {manifest.items} items ({manifest.source}).\n"
        f"{left}\n{manifest.note}"
    )

"""From a file of somebody's events to a log folder: detect, read, sort, write, and say what was left out.

In: a path and `ImportOptions`. Out: the log's manifest. Rows that were dropped are counted in it by reason; an input of which
nothing is left is a `UsageError`, and so is one whose format can't be told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from schemas.errors import UsageError
from schemas.log import LogManifest
from solaris.importers import movielens, otto, table, taobao
from solaris.importers.construct import Construct, ConstructConfig
from solaris.importers.folder import LogFolder
from solaris.importers.lines import Progress, head
from solaris.importers.observed import IMPRESSION, Observed
from solaris.importers.rows import Columns, Rows, write_events, write_items

Sniff = Callable[[Path, bytes], bool]

# The order matters: the first that knows the content wins, and a table is what is left.
SNIFFERS: dict[str, Sniff] = {
    "taobao": taobao.sniff,
    "otto": otto.sniff,
    "movielens": movielens.sniff,
    "parquet": table.sniff_parquet,
    "jsonl": table.sniff_jsonl,
    "csv": table.sniff_csv,
}
TABLES = {"csv": table.read_csv, "jsonl": table.read_jsonl, "parquet": table.read_parquet}
READERS = {"taobao": taobao.read, "otto": otto.read, "movielens": movielens.read}


@dataclass(frozen=True)
class ImportOptions:
    """`format`: one of `SNIFFERS` or None to detect; `constructed`: whether to make requests up."""

    format: str | None = None
    table: table.TableOptions = field(default_factory=table.TableOptions)
    construct: ConstructConfig = field(default_factory=ConstructConfig)
    constructed: bool = True
    force: bool = False


def import_log(
    path: Path, out: Path, options: ImportOptions | None = None, progress: Progress = lambda _: None
) -> LogManifest:
    """Read `path`, write the log folder `out`, return its manifest. Raises `UsageError`."""
    options = options or ImportOptions()
    form = detect(path, options.format)
    if form not in TABLES and (options.table.columns or options.table.constants):
        raise UsageError(
            f"--map and --constant are for tables, but {path} is {form}; add --format csv, jsonl or parquet"
        )
    rows = Rows()
    read = partial(TABLES[form], options=options.table) if form in TABLES else READERS[form]
    read(path, rows, lambda share: progress(share / 2))
    if not len(rows):
        raise UsageError(f"{path}: no row could be used as {form}; dropped: {_reasons(rows)}{_hint(rows)}")
    dropped = dict(sorted(rows.dropped.items()))
    columns = rows.columns()
    with LogFolder(out, force=options.force) as folder:
        for done in write_events(columns, folder):
            progress(0.5 + done / len(columns) / 4)
        write_items(columns, folder, known=form == "movielens")
        constructed, label, note = _requests(columns, folder, options, rated=form == "movielens")
        progress(1.0)
        return folder.finish(
            LogManifest(
                source=f"{form}: {path.name}",
                events=folder.lines["events"],
                requests=folder.lines["requests"],
                items=folder.lines["items"],
                first_ts=int(columns.ts[0]),
                last_ts=int(columns.ts[-1]),
                constructed=constructed,
                dropped=dropped,
                label=label,
                note=note,
            )
        )


def detect(path: Path, form: str | None = None) -> str:
    """The format of `path`, by its content. Raises `UsageError` when it is missing, ours already, or not clear."""
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if (path / "log.json").is_file():
        raise UsageError(f"{path} is a log folder already; use it as it is")
    if form is not None:
        if form not in SNIFFERS:
            raise UsageError(f"--format {form} is not one of {', '.join(SNIFFERS)}")
        return form
    start = b"" if path.is_dir() else head(path)
    for name, sniff in SNIFFERS.items():
        if sniff(path, start):
            return name
    line = start.partition(b"\n")[0][:80].decode(errors="replace")
    what = "holds no ratings" if path.is_dir() else f"begins with {line!r}" if start else "is empty"
    raise UsageError(f"{path} {what}: the format can't be told; add --format {', '.join(SNIFFERS)}")


def _requests(columns: Columns, folder: LogFolder, options: ImportOptions, *, rated: bool) -> tuple[bool, str, str]:
    """Write the requests; (constructed, label, note)."""
    if columns.kind_mask(IMPRESSION).any():
        observed = Observed(columns)
        for lines in observed.lines():
            folder.write("requests", lines)
        return False, "positive event after the impression", observed.note()
    if not options.constructed:
        return False, "", "No impressions, and no requests were made up."
    construct = Construct(columns, options.construct, rated=rated)
    for lines in construct.lines():
        folder.write("requests", lines)
    label = "rating >= 4" if rated else "touched in the next stretch of the session"
    return True, label, construct.note()


def _reasons(rows: Rows) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in rows.dropped.most_common()) or "nothing (it has no rows)"


def _hint(rows: Rows) -> str:
    units = {"ts_seconds": "s", "ts_micros": "us", "ts_not_a_number": "iso"}
    unit = next((unit for reason, unit in units.items() if rows.dropped[reason]), None)
    return f"; try --ts-unit {unit}" if unit else ""

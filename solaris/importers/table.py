"""Any table with a row per event: CSV (with a header), JSON lines, Parquet; a column map says which column is what.

In: a path, `TableOptions`. Out: rows. Columns that aren't mapped are looked for under our own names. Missing required columns
are a `UsageError` that names what is there; a bad row is counted by reason.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import UsageError
from solaris.importers.lines import Progress, head, lines
from solaris.importers.rows import Rows

REQUIRED = ("user_id", "item_id", "event_type", "ts")
OPTIONAL = ("category", "request_id")
UNITS: Mapping[str, float] = {"s": 1000.0, "ms": 1.0, "us": 0.001}
_DELIMITERS = ",\t;|"
_BATCH_ROWS = 50_000


@dataclass(frozen=True)
class TableOptions:
    """Which column is what (`columns`: our name → theirs), what is the same in every row, and the unit of `ts`."""

    columns: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    ts_unit: str = "ms"

    def __post_init__(self) -> None:
        for name in (*self.columns, *self.constants):
            if name not in REQUIRED + OPTIONAL:
                near = difflib.get_close_matches(name, REQUIRED + OPTIONAL, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UsageError(f"{name} is no field of an event ({', '.join(REQUIRED + OPTIONAL)}){hint}")
        if self.ts_unit not in (*UNITS, "iso"):
            raise UsageError(f"--ts-unit {self.ts_unit} is not one of {', '.join(UNITS)}, iso")


def read_csv(path: Path, rows: Rows, progress: Progress, options: TableOptions) -> None:
    """CSV with a header; the delimiter is the one of `,` tab `;` `|` that the header has most of."""
    header_line = head(path).partition(b"\n")[0].decode(errors="replace")
    delimiter = max(_DELIMITERS, key=header_line.count)
    text = (line.decode(errors="surrogateescape") for line in lines(path, rows, progress))
    reader = csv.reader(text, delimiter=delimiter)
    header = [name.strip() for name in next(reader, [])]
    pick = _Picker(path, header, options)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error:
            rows.drop("not_csv")
            continue
        if fields is None:
            return
        if len(fields) == len(header):
            pick.add(rows, fields)
        elif fields:
            rows.drop("wrong_number_of_fields")


def read_jsonl(path: Path, rows: Rows, progress: Progress, options: TableOptions) -> None:
    """One JSON object a line; a row may leave optional fields out."""
    first = head(path).partition(b"\n")[0]
    decoder = msgspec.json.Decoder(dict[str, Any])
    try:
        names = list(decoder.decode(first))
    except msgspec.DecodeError:
        names = [*REQUIRED, *OPTIONAL]  # a torn first row decides nothing
    wanted = {theirs for ours, theirs in options.columns.items() if ours in OPTIONAL} | set(OPTIONAL)
    header = [*names, *sorted(wanted - set(names))]
    pick = _Picker(path, header, options)
    for line in lines(path, rows, progress):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            rows.drop("not_json" if line.endswith(b"\n") else "last_line_cut")
            continue
        pick.add(rows, [record.get(name) for name in header])


def read_parquet(path: Path, rows: Rows, progress: Progress, options: TableOptions) -> None:
    """Parquet, a batch at a time, only the columns that are needed; timestamps become ms whatever their unit."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path} can't be read as Parquet: {error}; write it again") from None
    header = list(file.schema_arrow.names)
    pick = _Picker(path, header, options)
    done = 0
    for batch in file.iter_batches(_BATCH_ROWS, columns=[header[index] for index in sorted(set(pick.used))]):
        found = {name: _values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        blank = [None] * batch.num_rows
        for record in zip(*[found.get(name, blank) for name in header], strict=True):
            pick.add(rows, record)
        done += batch.num_rows
        progress(done / max(file.metadata.num_rows, 1))


def _values(column: Any) -> list[Any]:
    import pyarrow as pa

    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
        return [None if value is None else _Millis(value) for value in column.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


class _Millis(int):
    """A time that is in ms already, whatever --ts-unit says."""


class _Picker:
    """Takes an event out of a row of values in the order of `header`."""

    def __init__(self, path: Path, header: Sequence[str], options: TableOptions) -> None:
        self.options = options
        self.places: dict[str, int] = {}
        for name in REQUIRED + OPTIONAL:
            theirs = options.columns.get(name, name)
            if theirs in header:
                self.places[name] = header.index(theirs)
            elif name in options.columns or (name in REQUIRED and name not in options.constants):
                near = difflib.get_close_matches(theirs, header, 1, 0.5)
                hint = f"--map {name}={near[0] if near else 'COLUMN'}"
                fixed = f" or --constant {name}=VALUE" if name != "ts" else ""
                raise UsageError(f"{path} has no column {theirs}; it has {', '.join(header)}. Add {hint}{fixed}")
        self.used = list(self.places.values())
        self.fixed = {name: value.encode() for name, value in options.constants.items()}

    def add(self, rows: Rows, record: Sequence[Any]) -> None:
        ts = self._ts(record, rows)
        if ts is None:
            return
        fields: dict[str, bytes] = {}
        for name in ("user_id", "item_id", "event_type", *OPTIONAL):
            value = record[self.places[name]] if name in self.places else self.fixed.get(name)
            text = _text(value)
            if text is None:
                rows.drop(f"{name}_not_text_or_integer")
                return
            fields[name] = text
        rows.add(
            fields["user_id"], fields["item_id"], fields["event_type"], ts, fields["category"], fields["request_id"]
        )

    def _ts(self, record: Sequence[Any], rows: Rows) -> int | None:
        value = record[self.places["ts"]] if "ts" in self.places else self.options.constants["ts"]
        if value is None or value == "":
            rows.drop("ts_missing")
            return None
        ts = value if isinstance(value, _Millis) else to_ms(value, self.options.ts_unit)
        if ts is None:
            rows.drop("ts_not_" + ("iso" if self.options.ts_unit == "iso" else "a_number"))
        return ts


def to_ms(value: Any, unit: str) -> int | None:
    """UTC ms of a time in `unit`, rounded down; text without a zone is UTC. None where it is no such time."""
    if unit == "iso":
        try:
            moment = datetime.fromisoformat(value) if isinstance(value, str) else value
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            return math.floor(moment.timestamp() * 1000)
        except (ValueError, AttributeError, OverflowError):
            return None
    if isinstance(value, bool):
        return None
    try:
        if unit == "ms" and not isinstance(value, float):
            return int(value)
        return math.floor(float(value) * UNITS[unit])
    except (ValueError, TypeError, OverflowError):
        return None


def _text(value: Any) -> bytes | None:
    """An id as bytes; nothing at all is empty (and refused where an id is needed)."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # what spreadsheets and data frames make of an integer column with a gap
    if value is None:
        return b""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    return str(value).encode(errors="surrogateescape") if _clean(str(value)) else None


def _clean(text: str) -> bool:
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate from a JSON escape
        return False
    return True


def name_values(values: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` options as a mapping. Raises `UsageError`."""
    pairs: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not rest:
            raise UsageError(f"{value} is not NAME=VALUE, such as user_id=uid")
        pairs[name] = rest
    return pairs


def sniff_csv(path: Path, start: bytes) -> bool:
    """Whether the first line is a header: at least three columns, none of them a number."""
    line = start.partition(b"\n")[0].decode(errors="replace").rstrip("\r")
    names = next(csv.reader([line], delimiter=max(_DELIMITERS, key=line.count)), [])
    wordy = all(name.strip() and not name.strip().replace(".", "").isdigit() for name in names)
    return path.is_file() and len(names) >= 3 and wordy and not line.startswith("{")


def sniff_jsonl(path: Path, start: bytes) -> bool:
    """Whether the first line is a JSON object."""
    return path.is_file() and start.lstrip().startswith(b"{")


def sniff_parquet(path: Path, start: bytes) -> bool:
    """Whether the file has Parquet's magic bytes."""
    return path.is_file() and start.startswith(b"PAR1")

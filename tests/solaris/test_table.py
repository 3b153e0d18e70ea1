"""Tables: CSV, JSON lines and Parquet through a column map, with every fault counted and every wrong option named."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.errors import UsageError
from solaris.importers.table import TableOptions, name_values, to_ms
from tests.solaris.test_importers import imported, rows

MAPPED = TableOptions({"user_id": "uid", "item_id": "sku", "ts": "time", "event_type": "action"}, {}, "s")


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
def test_csv_with_a_column_map_and_faults(tmp_path: Path, delimiter: str) -> None:
    table = [
        ["time", "uid", "sku", "action", "price"],
        ["1700000001.5", "u1", '"a ""quoted"" id"', "click", "3"],
        ["1700000000", "u2", "i2", "buy", ""],
        ["", "u2", "i2", "buy", ""],
        ["x", "u2", "i2", "buy", ""],
        ["1700000000000", "u2", "i2", "buy", ""],
        ["1700000000", "u2", "i2", "$forget", ""],
        ["1700000000", "u2", "i2", "buy"],
        ["1700000000", "x" * 300, "i2", "buy", ""],
    ]
    text = "\n".join(delimiter.join(row) for row in table).encode() + b"\n"
    latin = delimiter.join(["1700000000", "caf\xe9", "i", "buy", ""]).encode("latin-1")
    log, manifest = imported(tmp_path, b"\xef\xbb\xbf" + text + latin + b"\n", table=MAPPED)
    assert rows(log) == [("u2", "i2", "buy", 1700000000000), ("u1", 'a "quoted" id', "click", 1700000001500)]
    assert manifest.dropped == {
        "event_type": 1,
        "id_long": 1,
        "not_utf8": 1,
        "ts_micros": 1,
        "ts_missing": 1,
        "ts_not_a_number": 1,
        "wrong_number_of_fields": 1,
    }


def test_jsonl_of_our_own_events_needs_no_map(tmp_path: Path) -> None:
    text = [
        {"user_id": 7, "item_id": "i", "event_type": "click", "ts": 1700000000001, "extra": [1]},
        {"user_id": "u", "item_id": 5.0, "event_type": "view", "ts": 1700000000000, "category": "c"},
        {"user_id": True, "item_id": "i", "event_type": "click", "ts": 1700000000001},
        {"user_id": "u", "item_id": "\ud800", "event_type": "click", "ts": 1700000000001},
        {"user_id": "u", "event_type": "click", "ts": 1700000000001},
        {"user_id": "u", "item_id": "i", "event_type": "click"},
    ]
    content = "\n".join(map(json.dumps, text)) + '\nnot json\n{"user_id":'
    log, manifest = imported(tmp_path, content.encode())
    assert rows(log) == [("u", "5", "view", 1700000000000), ("7", "i", "click", 1700000000001)]
    assert sum(manifest.dropped.values()) == 6
    assert {"last_line_cut", "ts_missing", "id_empty", "user_id_not_text_or_integer"} <= set(manifest.dropped)
    assert {item.item_id: item.category for item in log.items()} == {"5": "c", "i": None}


@pytest.mark.parametrize("stamp", [pa.timestamp("us"), pa.timestamp("s", "Asia/Tokyo"), pa.timestamp("ns"), None])
def test_parquet(tmp_path: Path, stamp: pa.DataType | None) -> None:
    seconds = pa.array([1700000001, 1700000000, None])
    times = seconds if stamp is None else pa.array([1700000001, 1700000000, None], pa.timestamp("s")).cast(stamp)
    table = pa.table({"uid": [1, 2, 3], "sku": ["a", "b", "c"], "time": times, "left": [[1], [2], [3]]})
    pq.write_table(table, tmp_path / "t.parquet")
    columns = {"user_id": "uid", "item_id": "sku", "ts": "time"}
    options = TableOptions(columns, {"event_type": "like"}, "s")  # a timestamp knows its unit
    log, manifest = imported(tmp_path, tmp_path / "t.parquet", table=options)
    assert rows(log) == [("2", "b", "like", 1700000000000), ("1", "a", "like", 1700000001000)]
    assert manifest.dropped == {"ts_missing": 1}


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        ("1700000000123", "ms", 1700000000123),
        (1700000000123.9, "ms", 1700000000123),
        ("1700000000.25", "s", 1700000000250),
        (1700000000000999, "us", 1700000000000),
        ("2023-11-14T22:13:20Z", "iso", 1700000000000),
        ("2023-11-14 22:13:20.5", "iso", 1700000000500),
        ("2023-11-15T07:13:20+09:00", "iso", 1700000000000),
        ("yesterday", "iso", None),
        ("nan", "s", None),
        ("1e999", "s", None),
        (True, "ms", None),
        ([], "ms", None),
        ("17000.5", "ms", None),
    ],
)
def test_times_in_every_unit(value: object, unit: str, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert to_ms(value, unit) == expected


def test_a_missing_column_is_named_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no column user_id; it has userid, .*--map user_id=userid or --constant user_id"
    ):
        imported(tmp_path, b"userid,item_id,event_type,ts\n1,2,click,3\n")
    with pytest.raises(UsageError, match="no column sku; it has"):
        imported(tmp_path, b"user_id,item_id,event_type,ts\n", table=TableOptions({"item_id": "sku"}))


def test_seconds_taken_for_ms_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ts_seconds 1; try --ts-unit s"):
        imported(tmp_path, b"user_id,item_id,event_type,ts\n1,2,click,1700000000\n")


def test_options_that_are_wrong_say_so() -> None:
    with pytest.raises(UsageError, match="did you mean user_id"):
        TableOptions({"userid": "x"})
    with pytest.raises(UsageError, match="--ts-unit"):
        TableOptions(ts_unit="h")
    with pytest.raises(UsageError, match="NAME=VALUE"):
        name_values(["user_id"])
    assert name_values(["ts=a=b"]) == {"ts": "a=b"}

"""Importers: small handmade files with every fault, each dropped row counted by its reason; and the real sets where they are."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas.errors import UsageError
from schemas.events import Event
from schemas.log import Log, LoggedRequest, LogManifest
from solaris.commands.import_ import app
from solaris.importers import lines as lines_module
from solaris.importers.importer import ImportOptions, detect, import_log
from solaris.importers.table import TableOptions

ROOT = Path(__file__).resolve().parents[2]
OTTO = ROOT / "tests" / "fixtures" / "otto" / "train.jsonl"
TAOBAO = ROOT.parent / "shared" / "data" / "taobao" / "UserBehavior.csv.gz"
T = 1_511_544_070  # within Taobao's days


def imported(tmp_path: Path, content: bytes | Path, **options: Any) -> tuple[Log, LogManifest]:
    """A log made of a file with this content."""
    path = content if isinstance(content, Path) else tmp_path / "input"
    if isinstance(content, bytes):
        path.write_bytes(content)
    manifest = import_log(path, tmp_path / "log", ImportOptions(**options))
    return Log(tmp_path / "log"), manifest


def rows(log: Log) -> list[tuple[object, object, str, int | None]]:
    return [(event.user_id, event.item_id, event.event_type, event.ts) for event in log.events()]


# Taobao


def test_taobao_is_sorted_mapped_and_its_faults_are_counted(tmp_path: Path) -> None:
    good = [
        f"1,10,7,pv,{T + 60}",
        f"1,11,7,buy,{T + 120}",
        f"2,10,7,fav,{T}",
        f"2,12,8,cart,{T + 60}",  # ties with the first row, and was behind it
    ]
    bad = ["1,10,7,pv,1400000000", f"1,10,7,gone,{T}", "1,10,7,pv,abc", f"1,10,pv,{T}", f",10,7,pv,{T}", f"1,,7,pv,{T}"]
    content = "\r\n".join([good[0], *bad, *good[1:]]).encode() + f"\n\xff\xfe,10,7,pv,{T}\n".encode("latin-1")
    log, manifest = imported(tmp_path, content + b"1,10,7,p")
    assert rows(log) == [
        ("2", "10", "favorite", T * 1000),
        ("1", "10", "view", (T + 60) * 1000),
        ("2", "12", "cart", (T + 60) * 1000),
        ("1", "11", "buy", (T + 120) * 1000),
    ]
    assert manifest.dropped == {
        "id_empty": 2,
        "last_line_cut": 1,
        "not_utf8": 1,
        "ts_not_a_number": 1,
        "ts_outside_2017-11-25..12-03_utc+8": 1,
        "unknown_type": 1,
        "wrong_number_of_fields": 1,
    }
    assert [(item.item_id, item.category, item.ts) for item in log.items()] == [
        ("10", "7", T * 1000),
        ("12", "8", (T + 60) * 1000),
        ("11", "7", (T + 120) * 1000),
    ]
    assert (manifest.first_ts, manifest.last_ts, manifest.constructed) == (T * 1000, (T + 120) * 1000, True)


@pytest.mark.parametrize(
    ("seconds", "kept"), [(1_511_539_199, 0), (1_511_539_200, 1), (1_512_316_799, 1), (1_512_316_800, 0)]
)
def test_taobao_days_are_chinas(tmp_path: Path, seconds: int, kept: int) -> None:
    _, manifest = imported(tmp_path, f"1,1,1,pv,{T}\n1,2,1,pv,{seconds}\n".encode())
    assert manifest.events == 1 + kept


def test_gzip_that_ends_early_keeps_what_was_whole(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(b"%d,%d,1,pv,%d\n" % (n, n * 7919 % 1000, T + n) for n in range(5000)))
    log, manifest = imported(tmp_path, packed[: len(packed) // 2])
    assert 500 < manifest.events < 5000
    assert manifest.dropped["gzip_ends_early"] == 1
    assert len(rows(log)) == manifest.events


def test_lines_too_long_are_skipped_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LINE_BYTES_MAX", 64)
    content = f"1,1,1,pv,{T}\n{'9' * 300}\n2,2,1,pv,{T}\n".encode()
    _, manifest = imported(tmp_path, content)
    assert (manifest.events, manifest.dropped) == (2, {"line_too_long": 1})


@pytest.mark.skipif(not TAOBAO.is_file(), reason="the Taobao log may not be committed and is not beside this checkout")
def test_the_real_taobao_log(tmp_path: Path) -> None:
    log, manifest = imported(tmp_path, TAOBAO)
    assert (manifest.events, manifest.items) == (84_440, 55_344)
    assert manifest.dropped == {"last_line_cut": 1, "ts_outside_2017-11-25..12-03_utc+8": 35}
    requests = list(log.requests())
    assert len(requests) == manifest.requests > 20_000
    times = [event.ts or 0 for event in log.events()]
    assert times == sorted(times)
    assert sum(sum(request.labels) for request in requests) > 70_000
    assert sum(len(request.candidates) for request in requests) / len(requests) > 14


# OTTO


def test_otto_fixture(tmp_path: Path) -> None:
    log, manifest = imported(tmp_path, OTTO)
    assert (manifest.events, manifest.dropped) == (862, {})
    assert len({event.user_id for event in log.events()}) == 20
    assert {event.event_type for event in log.events()} == {"click", "cart", "buy"}


def test_otto_bad_events_fall_alone(tmp_path: Path) -> None:
    ok = '{"aid":1,"ts":1659304800025,"type":"clicks"}'
    bad = [
        '{"aid":1,"ts":"x","type":"clicks"}',
        '{"aid":1,"ts":1659304800,"type":"carts"}',
        '{"aid":1,"ts":1659304800025,"type":"x"}',
    ]
    text = [
        f'{{"session":1,"events":[{ok},{",".join(bad)}]}}',
        '{"session":2}',
        "[]",
        "",
        '{"session":"s\u00fc","events":[' + ok.replace("clicks", "orders") + "]}",
        '{"session":3,"events":[{"aid":1,',
    ]
    log, manifest = imported(tmp_path, "\n".join(text).encode())
    assert rows(log) == [("1", "1", "click", 1659304800025), ("s\u00fc", "1", "buy", 1659304800025)]
    assert manifest.dropped == {
        "last_line_cut": 1,
        "not_a_session": 2,
        "not_an_event": 1,
        "ts_seconds": 1,
        "unknown_type": 1,
    }


# MovieLens


def atomic(folder: Path) -> Path:
    folder.mkdir()
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    ratings = "1\t10\t4\t881250949\n1\t11\t3\t881250949\n2\t10\t5\t881250950\n2\t12\tx\t881250950\n2\t12\t9\t881250950\n1\t1\n"
    (folder / "ml-100k.inter").write_text(header + ratings)
    items = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    (folder / "ml-100k.item").write_bytes(
        items.encode() + b"10\tCaf\xe9\t1995\tComedy Drama\n11\tB\t1996\t\n13\tC\t1\tWar\n"
    )
    return folder


def test_movielens_atomic_files(tmp_path: Path) -> None:
    log, manifest = imported(tmp_path, atomic(tmp_path / "ml-100k"))
    assert rows(log) == [
        ("1", "10", "like", 881250949000),
        ("1", "11", "dislike", 881250949000),
        ("2", "10", "like", 881250950000),
    ]
    assert manifest.dropped == {
        "item_without_genre": 1,
        "rating_or_ts_not_a_number": 1,
        "rating_outside_0.5..5": 1,
        "wrong_number_of_fields": 1,
    }
    assert {item.item_id: (item.category, item.ts) for item in log.items()} == {
        "10": ("Comedy", None),
        "11": (None, None),
        "13": ("War", None),
    }
    requests = {request.user_id: request for request in log.requests()}
    assert dict(zip(requests["1"].candidates, requests["1"].labels, strict=True)) == {"10": 1, "11": 0}
    assert requests["1"].ts == 881250949000 - 1
    assert (manifest.label, manifest.constructed) == ("rating >= 4", True)


def test_movielens_original_files(tmp_path: Path) -> None:
    folder = tmp_path / "ml"
    folder.mkdir()
    (folder / "u.data").write_text("196\t242\t3\t881250949\n186\t302\t4\t891717742\n")
    flags = ["0"] * 19
    flags[5] = flags[8] = "1"
    (folder / "u.item").write_bytes(b"242|Caf\xe9 (1996)|24-Jan-1997||url|" + "|".join(flags).encode() + b"\n")
    log, _ = imported(tmp_path, folder)
    assert [event.event_type for event in log.events()] == ["dislike", "like"]
    assert {item.item_id: item.category for item in log.items()} == {"242": "Comedy", "302": None}
    assert detect(folder / "u.data") == "movielens"


@pytest.mark.skipif(
    "ML_100K" not in os.environ, reason="ML_100K names no folder with ml-100k, which may not be committed"
)
def test_the_real_ml_100k(tmp_path: Path) -> None:
    _, manifest = imported(tmp_path, Path(os.environ["ML_100K"]))
    assert (manifest.events, manifest.items, manifest.dropped) == (100_000, 1_682, {})


# Impressions that the log has itself


def event_line(user: str, item: str, kind: str, ts: int, request: str | None = None) -> bytes:
    fields = {"user_id": user, "item_id": item, "event_type": kind, "ts": 1700000000000 + ts}
    return json.dumps(fields | ({"request_id": request} if request else {})).encode() + b"\n"


def test_impressions_become_their_own_requests(tmp_path: Path) -> None:
    content = [
        event_line("u", "a", "impression", 0, "r1"),
        event_line("u", "b", "impression", 0, "r1"),
        event_line("u", "c", "impression", 5, "r1"),
        event_line("u", "b", "view", 1000, "r1"),  # looking is no positive outcome
        event_line("u", "a", "click", 2000),
        event_line("u", "a", "impression", 60_000),
        event_line("u", "c", "impression", 60_000),
        event_line("v", "a", "impression", 60_000),
        event_line("u", "c", "buy", 61_000),  # the later impression has the credit
        event_line("v", "a", "click", 60_000 + 30 * 60_000 + 1),  # too late
    ]
    log, manifest = imported(tmp_path, b"".join(content))
    found = {(request.user_id, tuple(request.candidates)): (request.ts, request.labels) for request in log.requests()}
    start = 1700000000000
    assert found == {
        ("u", ("a", "b", "c")): (start, [1, 0, 0]),
        ("u", ("a", "c")): (start + 60_000, [0, 1]),
        ("v", ("a",)): (start + 60_000, [0]),
    }
    assert next(log.requests()).request_id == "r1"
    assert (manifest.constructed, manifest.events) == (False, 10)
    assert next(log.events()).request_id == "r1"


# Detection and the command


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (b"1,2268318,2520377,pv,1511544070\n", "taobao"),
        (b'{"session":0,"events":[{"aid":1', "otto"),
        (b'{"user_id":1}\n', "jsonl"),
        (b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n", "movielens"),
        (b"196\t242\t3\t881250949\n", "movielens"),
        (b"a;b;c\n", "csv"),
        (gzip.compress(b"a,b,c\n"), "csv"),
    ],
)
def test_formats_are_told_by_content(tmp_path: Path, content: bytes, form: str) -> None:
    (tmp_path / "input").write_bytes(content)
    assert detect(tmp_path / "input") == form


@pytest.mark.parametrize("content", [b"", b"1,2,3,4\n", b"hello\n", b"\x89PNG\r\n"])
def test_what_can_not_be_told_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "input").write_bytes(content)
    with pytest.raises(UsageError, match="add --format"):
        detect(tmp_path / "input")


def test_other_encodings_folders_and_logs_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "wide").write_bytes("a,b,c\n".encode("utf-16"))
    with pytest.raises(UsageError, match="iconv"):
        detect(tmp_path / "wide")
    with pytest.raises(UsageError, match="iconv"):
        import_log(tmp_path / "wide", tmp_path / "x", ImportOptions(format="csv"))
    with pytest.raises(UsageError, match="does not exist"):
        detect(tmp_path / "none")
    with pytest.raises(UsageError, match="holds no ratings"):
        detect(tmp_path)
    (tmp_path / "torn.gz").write_bytes(b"\x1f\x8bnot gzip")
    with pytest.raises(UsageError, match="gzip"):
        detect(tmp_path / "torn.gz")
    imported(tmp_path, OTTO)
    with pytest.raises(UsageError, match="log folder already"):
        detect(tmp_path / "log")
    with pytest.raises(UsageError, match="for tables, but"):
        import_log(OTTO, tmp_path / "x", ImportOptions(table=TableOptions({"ts": "time"})))
    with pytest.raises(UsageError, match="not one of"):
        detect(OTTO, "xml")


def test_command_says_what_was_dropped(tmp_path: Path) -> None:
    (tmp_path / "input").write_text(f"1,10,7,pv,{T}\n1,11,7,pv,{T + 1}\n1,1,1,pv,5\n")
    run = [str(tmp_path / "input"), "--out", str(tmp_path / "log")]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    assert "Dropped 1 rows: ts_outside_2017-11-25..12-03_utc+8 1." in result.output
    facts = json.loads(CliRunner().invoke(app, [*run, "--force", "--json"]).output)
    assert (facts["events"], facts["dropped"]) == (2, {"ts_outside_2017-11-25..12-03_utc+8": 1})


def test_a_log_without_requests_on_demand(tmp_path: Path) -> None:
    log, manifest = imported(tmp_path, OTTO, constructed=False)
    requests: list[LoggedRequest] = list(log.requests())
    events: list[Event] = list(log.events())
    assert (requests, manifest.requests, len(events)) == ([], 0, 862)

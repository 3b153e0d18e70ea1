"""State on disk: killed in the middle, locked, damaged, full, of another make; and copies of it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schemas.errors import FatalError, StateError, UsageError
from streams.state.manifest import SCHEMA, FolderLock, StateManifest, TopicState, read_manifest, set_aside
from streams.state.rocks import RocksStore, StateConfig, open_store
from tests.streams.state.writer import MANIFEST, ROWS, commit_batch

TOPICS = {"events": TopicState("id-1", 4), "embeddings": TopicState("id-2", 4)}


@contextmanager
def writer(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.streams.state.writer", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def check_whole(store: RocksStore) -> int:
    """Rows and stamp agree; returns the stamp."""
    stamp = store.stamp("events") or 0
    wanted = sorted(f"{number:08}/{row}".encode() for number in range(stamp) for row in range(ROWS))
    for table in ("history", "pairs"):
        assert [key for key, _ in store.rows(table)] == wanted, f"{table} does not end at its stamp {stamp}"
    return stamp


def test_killed_in_the_middle_nothing_committed_is_lost_and_nothing_is_half(tmp_path: Path) -> None:
    said = 0
    for kill_after in (3, 40, 11):
        with writer("write", str(tmp_path / "0")) as process:
            assert int(line(process)) >= said, "the restarted process begins before what was said"
            for _ in range(kill_after):
                said = int(line(process))
    store = open_store(tmp_path / "0", MANIFEST)
    assert check_whole(store) >= said
    store.close()


def test_a_disk_that_refuses_is_fatal_and_leaves_whole_batches(tmp_path: Path) -> None:
    with writer("fill", str(tmp_path / "0"), "1000000") as process:
        line(process)
        reached, _, sentence = line(process).partition(" ")
        assert process.wait(20) == 3
    assert f"The state in {tmp_path / '0'} can't be written" in sentence
    store = open_store(tmp_path / "0", MANIFEST)
    assert check_whole(store) == int(reached) > 0
    commit_batch(store, int(reached))
    store.close()


def test_a_living_holder_is_waited_for_and_a_dead_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    slept: list[float] = []
    with writer("hold", str(folder)) as process:
        line(process)
        with pytest.raises(StateError, match=f"{folder} is in use by process {process.pid} .waited 300 ms"):
            open_store(folder, MANIFEST, StateConfig(lock_wait_ms=300), slept.append)
        assert slept == [0.1] * 3
        with pytest.raises(StateError, match="waited 0 ms"):
            open_store(folder, MANIFEST)
        process.kill()
        process.wait()
        open_store(folder, MANIFEST).close()


def test_a_lock_given_back_while_waiting_is_taken(tmp_path: Path) -> None:
    held = FolderLock(tmp_path / "0", 0, None)
    open_store(tmp_path / "0", MANIFEST, StateConfig(lock_wait_ms=500), lambda _: held.release()).close()


def test_close_gives_everything_back_even_with_a_reader_in_the_middle(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", MANIFEST)
    commit_batch(store, 0)
    reader = store.rows("pairs")
    next(reader)
    store.close()
    again = open_store(tmp_path / "0", MANIFEST)
    assert check_whole(again) == 1
    again.close()


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (StateManifest(0, 7, {**TOPICS, "events": TopicState("id-9", 4)}), "events was created anew"),
        (StateManifest(0, 7, {**TOPICS, "embeddings": TopicState("id-2", 8)}), "embeddings had 4 partitions, now 8"),
        (StateManifest(1, 7, TOPICS), "it holds partition 0, not 1"),
        (StateManifest(0, 7, TOPICS, schema=SCHEMA + 1), "its schema is"),
    ],
)
def test_a_directory_that_does_not_fit_is_set_aside_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: StateManifest, reason: str
) -> None:
    old = open_store(tmp_path / "0", StateManifest(0, 7, TOPICS))
    commit_batch(old, 0)
    old.close()
    with caplog.at_level(logging.ERROR):
        store = open_store(tmp_path / "0", wanted)
    assert store.aside == tmp_path / "0.aside-1"
    assert reason in caplog.text
    assert str(tmp_path / "0") in caplog.text
    assert (check_whole(store), read_manifest(tmp_path / "0")) == (0, wanted)
    store.close()
    kept = open_store(tmp_path / "0.aside-1", StateManifest(0, 7, TOPICS))
    assert check_whole(kept) == 1
    kept.close()


def test_another_space_and_other_topics_fit(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", StateManifest(0, 7, TOPICS))
    commit_batch(store, 0)
    store.close()
    wanted = StateManifest(0, 8, {"events": TOPICS["events"], "items": TopicState("id-3", 1)})
    store = open_store(tmp_path / "0", wanted)
    assert (store.aside, check_whole(store), read_manifest(tmp_path / "0")) == (None, 1, wanted)
    store.close()


@pytest.mark.parametrize("damage", ["manifest torn", "manifest gone"])
def test_a_directory_without_a_manifest_is_set_aside(tmp_path: Path, damage: str) -> None:
    open_store(tmp_path / "0", MANIFEST).close()
    path = tmp_path / "0" / "manifest.json"
    if damage == "manifest torn":
        path.write_bytes(path.read_bytes()[:10])
    else:
        path.unlink()
    set_aside_before = tmp_path / "0.aside-1"
    set_aside_before.mkdir()
    store = open_store(tmp_path / "0", MANIFEST)
    assert store.aside == tmp_path / "0.aside-2"
    store.close()


@pytest.mark.parametrize("file", ["CURRENT", "MANIFEST-*"])
def test_a_damaged_database_is_named(tmp_path: Path, file: str) -> None:
    open_store(tmp_path / "0", MANIFEST).close()
    for path in (tmp_path / "0" / "db").glob(file):
        path.write_bytes(b"\xff" * 40)
    with pytest.raises(StateError, match=f"The state in {tmp_path / '0'} can't be read"):
        open_store(tmp_path / "0", MANIFEST)
    set_aside(tmp_path / "0", "damaged")  # the lock was given back with the error
    open_store(tmp_path / "0", MANIFEST).close()


def test_an_open_database_that_can_not_be_read_is_fatal_so_that_no_record_is_blamed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", MANIFEST)
    commit_batch(store, 0)
    keys = [key for key, _ in store.rows("pairs")]
    store.close()  # writes the rows into tables
    store = open_store(tmp_path / "0", MANIFEST)
    tables = list((tmp_path / "0" / "db").glob("*.sst"))
    assert tables
    for path in tables:
        path.write_bytes(b"\xff" * path.stat().st_size)
    for read in (store.get, store.scan):
        with pytest.raises(FatalError, match=f"The state in {tmp_path / '0'} can't be read"):
            read("pairs", keys)
    with pytest.raises(FatalError, match="can't be read"):
        list(store.rows("pairs"))
    store.close()


def test_a_database_open_elsewhere_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", MANIFEST)
    (tmp_path / "0.lock").unlink()  # someone tidied up: RocksDB's own lock still holds
    with pytest.raises(StateError, match="is open elsewhere"):
        open_store(tmp_path / "0", MANIFEST)
    store.close()


def test_a_folder_that_can_not_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file/0 can't be made or locked"):
        open_store(tmp_path / "file" / "0", MANIFEST)


def test_a_checkpoint_is_a_state_directory_of_its_moment(tmp_path: Path) -> None:
    store = open_store(tmp_path / "0", MANIFEST)
    commit_batch(store, 0)
    store.checkpoint(tmp_path / "checkpoints" / "1")
    commit_batch(store, 1)
    with pytest.raises(UsageError, match="exists"):
        store.checkpoint(tmp_path / "checkpoints" / "1")
    store.close()
    copy = open_store(tmp_path / "checkpoints" / "1", MANIFEST)
    assert (copy.aside, check_whole(copy)) == (None, 1)
    commit_batch(copy, 1)
    copy.close()

"""The command line: what it lists, what it imports (which is how fast it is), how it fails."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import SolarisError
from solaris import cli
from solaris.generate import generate
from solaris.world import GenerateConfig

ROOT = Path(__file__).resolve().parents[2]


def solaris(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "solaris", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


HEAVY = {
    "torch", "faust", "aiokafka", "numba", "hnswlib", "rocksdict", "pyarrow", "rich", "confluent_kafka", "numpy", "models",
    "streams",
}  # fmt: skip
CLIENT = {"confluent_kafka", "numpy"}
"""What a client of Kafka may import once it works: the client, and what the records' types need."""


def imported(*arguments: str) -> tuple[set[str], str]:
    """The heavy modules that a call imports, and its stdout."""
    code = (
        f"import atexit, json, sys; sys.argv = ['solaris', *{list(arguments)!r}]\n"
        f"atexit.register(lambda: print('imported', json.dumps(sorted({HEAVY!r} & set(sys.modules))), file=sys.stderr))\n"
        "from solaris.cli import main; main()"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    (found,) = [said for said in done.stderr.splitlines() if said.startswith("imported ")]
    return set(json.loads(found.removeprefix("imported "))), done.stdout


def test_help_lists_every_verb_and_imports_nothing_heavy() -> None:
    modules, shown = imported("--help")
    assert modules == set()
    assert [verb for verb in cli.verbs() if f"\n  {verb} " not in shown] == []


@pytest.mark.parametrize("verb", list(cli.verbs()))
def test_a_verb_s_help_imports_nothing_heavy(verb: str) -> None:
    modules, _ = imported(verb, "--help")
    assert modules <= {"generate": {"numpy"}, "import": {"numpy"}}.get(verb, set())


@pytest.mark.parametrize("call", [("rank", "u", "i"), ("topics", "list"), ("produce", "LOG")], ids=lambda call: call[0])
def test_a_client_of_kafka_imports_no_model_and_no_worker(
    call: tuple[str, ...], tmp_path: Path, unused_tcp_port: int
) -> None:
    """Up to where the broker doesn't answer; settings of workers, which lie in heavy modules, are there."""
    generate(GenerateConfig(users=3, items=60, days=0.1), tmp_path / "log")
    words = [str(tmp_path / "log") if word == "LOG" else word for word in call]
    settings = ["--set", "serve.ttl_ms=4h", "--set", "transport.commit_ms=50"]
    modules, _ = imported(*settings, *words, "--bootstrap", f"127.0.0.1:{unused_tcp_port}")
    assert "confluent_kafka" in modules
    assert modules <= CLIENT


@pytest.mark.parametrize("setting", ["serve.tll_ms=4h", "state.x=1", "predict.source=reactive", "transport.commit=1"])
def test_a_client_refuses_an_unknown_key_of_a_worker_s_section(setting: str, unused_tcp_port: int) -> None:
    failed = solaris("--set", setting, "topics", "list", "--bootstrap", f"127.0.0.1:{unused_tcp_port}")
    assert failed.returncode == 2
    assert failed.stderr.startswith(f"solaris: --set {setting.partition('=')[0]}: there is no such key; ")


@pytest.mark.parametrize("verb", list(cli.verbs()))
def test_every_verb_explains_itself_with_examples_and_exit_codes(verb: str) -> None:
    help_text = solaris(verb, "--help")
    assert help_text.returncode == 0, help_text.stderr
    assert "Example" in help_text.stdout
    assert "xit code" in help_text.stdout


def test_our_errors_are_one_sentence_and_an_exit_code() -> None:
    failed = solaris("--set", "kafka.bootstap=x", "topics", "list")
    assert failed.returncode == 2
    assert failed.stderr == "solaris: --set kafka.bootstap: there is no such key; did you mean `bootstrap`?\n"
    assert "Traceback" in solaris("--debug", "--set", "kafka.bootstap=x", "topics", "list").stderr


def test_an_unknown_verb_gets_the_nearest() -> None:
    failed = solaris("brokr")
    assert failed.returncode == 2
    assert "broker" in failed.stderr


def test_a_stranger_s_package_of_our_name_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = tmp_path / "streams"
    stranger.mkdir()
    (stranger / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "streams", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(SolarisError, match=f"`streams` is found at {stranger}"):
        cli.check_names()

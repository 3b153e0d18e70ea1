"""The command line: what it lists, how fast, how it fails."""

from __future__ import annotations

import importlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import SolarisError
from solaris import cli

ROOT = Path(__file__).resolve().parents[2]


def solaris(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "solaris", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_every_verb_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from solaris.cli import app\n"
        "try: app(['--help'])\n"
        "finally: print(sorted({'torch', 'faust', 'confluent_kafka', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stderr.strip() == "[]"
    assert [verb for verb in cli.verbs() if f"\n  {verb} " not in shown.stdout] == []


def test_help_is_quick() -> None:
    def once() -> float:
        """Seconds of processor time, so that a busy machine doesn't count."""
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        solaris("--help")
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime

    assert min(once() for _ in range(5)) < 0.3


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

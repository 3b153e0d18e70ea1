"""Settings: which source wins, what is refused and with which words, and that secrets stay unseen."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from agents.kafka import KafkaConfig
from agents.worker import WorkerConfig
from models.bundle import MANIFEST
from schemas.errors import ConfigError
from solaris.cli import app
from solaris.config import SECTIONS, Config, load
from streams.items import ItemsConfig
from streams.speculate import SpeculateConfig


@dataclass(frozen=True)
class Part:
    """A section with a field of every kind that the loader knows."""

    ttl_ms: int = 1_000
    rows_max: int = 10
    share: float = 0.5
    on: bool = False
    mode: Literal["fast", "exact"] = "fast"
    folder: Path | None = None
    names: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False, metadata={"secret": True})


def read(text: str = "", env: dict[str, str] | None = None, flags: tuple[str, ...] = (), *, folder: Path) -> Part:
    file = folder / "solaris.toml"
    file.write_text(text)
    return load(file, env, flags, {"part": Part}).get(Part)


def test_the_later_source_wins(tmp_path: Path) -> None:
    text = "[part]\nrows_max = 1\nshare = 0.1\nmode = 'exact'\n"
    env = {"SOLARIS_PART__ROWS_MAX": "2", "SOLARIS_PART__SHARE": "0.2", "OTHER": "x"}
    part = read(text, env, ("part.rows_max=3",), folder=tmp_path)
    assert (part.rows_max, part.share, part.mode, part.on) == (3, 0.2, "exact", False)


def test_text_becomes_the_field_s_type(tmp_path: Path) -> None:
    flags = ("part.on=true", "part.folder=a/b", "part.names=x, y", "part.mode=exact", "part.share=1")
    part = read(flags=flags, folder=tmp_path)
    assert part == Part(on=True, folder=Path("a/b"), names=("x", "y"), mode="exact", share=1.0)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("4h", 14_400_000),
        ("10min", 600_000),
        ("500ms", 500),
        ("1.5s", 1_500),
        ("7d", 604_800_000),
        ("250", 250),
        ("0", 0),
    ],
)
def test_durations(text: str, ms: int, tmp_path: Path) -> None:
    assert read(flags=(f"part.ttl_ms={text}",), folder=tmp_path).ttl_ms == ms
    assert read(f"[part]\nttl_ms = '{text}'\n", folder=tmp_path).ttl_ms == ms


@pytest.mark.parametrize(
    ("text", "flags", "sentence"),
    [
        ("[part]\nrow_max = 1", (), "did you mean `rows_max`"),
        ("[prt]\nrows_max = 1", (), r"no section \[prt\]; did you mean `part`"),
        ("rows_max = 1", (), "outside of a section"),
        ("[part", (), "is not TOML"),
        ("[part]\nrows_max = 'many'", (), "'many' does not fit"),
        ("[part]\nttl_ms = '4 hours'", (), "'4 hours' is no duration"),
        ("[part]\nmode = 'slow'", (), "'slow' does not fit"),
        ("", ("part.ttl_ms=0.5ms",), "does not fit"),
        ("", ("part.rows_max",), "SECTION.KEY=VALUE"),
        ("", ("rows_max=3",), "SECTION.KEY=VALUE"),
    ],
)
def test_what_is_wrong_is_said(text: str, flags: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(text, flags=flags, folder=tmp_path)


def test_a_variable_with_one_underscore_is_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SOLARIS_PART_ROWS_MAX: two underscores"):
        read(env={"SOLARIS_PART_ROWS_MAX": "3"}, folder=tmp_path)


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml can't be read"):
        load(tmp_path / "absent.toml", sections={"part": Part})


def test_secrets_come_from_the_environment_or_a_file_and_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    from_file = read(f"[part]\ntoken_file = '{tmp_path / 'token'}'\n", folder=tmp_path)
    from_environment = read(env={"SOLARIS_PART__TOKEN": "s3cret"}, folder=tmp_path)
    assert from_file.token == from_environment.token == "s3cret"
    assert "s3cret" not in repr(from_file)


@pytest.mark.parametrize(("text", "flags"), [("[part]\ntoken = 's3cret'", ()), ("", ("part.token=s3cret",))])
def test_secrets_are_refused_elsewhere_without_repeating_them(
    text: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="token_file") as caught:
        read(text, flags=flags, folder=tmp_path)
    assert "s3cret" not in str(caught.value)


def test_every_registered_section_loads_with_its_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no solaris.toml is
    config = load()
    assert isinstance(config, Config)
    assert set(config.sections) == set(SECTIONS)
    assert config.get(KafkaConfig).bootstrap == "127.0.0.1:9092"


def test_every_limit_of_a_worker_has_its_place_in_the_settings() -> None:
    """A worker is given sections, and beside them only what a command line says: where things lie, and on which device."""
    hints = typing.get_type_hints(WorkerConfig)
    plain = {name for name, kind in hints.items() if not dataclasses.is_dataclass(kind)}
    assert plain == {"bundle", "state_dir", "stats", "device"}
    config = load(overrides=["items.items_max=12345"])
    reachable = {type(section) for section in config.sections.values()}
    made_of_sections = {SpeculateConfig}  # its own fields are serve's (solaris/commands/worker.py)
    assert {kind for name, kind in hints.items() if name not in plain} - made_of_sections <= reachable
    assert config.get(ItemsConfig).items_max == 12_345


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"bootstrap": " "}, "bootstrap is empty"),
        ({"security_protocol": "SASL_SSL"}, "set sasl_username"),
        ({"ssl_key_location": Path("k")}, "belong together"),
    ],
)
def test_kafka_settings_that_contradict_each_other(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        KafkaConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("transport.delivery_ms_max=30s", r"\[transport\] want delivery_ms_max < barrier_ms_max"),
        ("predict.sources=reactive,telepathy", r"\[predict\] sources: \['telepathy'\] is unknown"),
        ("predict.sample_rate=0", r"\[predict\] sample_rate is 0"),
        ("items.items_max=0", r"\[items\] items_max is 0"),
        ("predict.items_max=0", r"\[predict\] items_max is 0"),
        ("verify.request_pairs_max=1001", r"\[verify\] request_pairs_max is 1001; .* 1 to 1000 items"),
        ("verify.window_ms=0", r"\[verify\] window_ms is 0"),
        ("serve.history_rows_max=513", r"\[serve\] history_rows_max is 513; .* 1 to 512 rows"),
        ("serve.shown_rows_max=0", r"\[serve\] shown_rows_max is 0"),
        ("serve.pane_ms=7min", r"\[serve\] window_ms is 86400000, which is not whole panes of pane_ms = 420000"),
    ],
)
def test_a_section_that_can_not_work_is_refused_before_anything_starts(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(overrides=[setting])


def test_the_worker_command_hands_every_section_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[WorkerConfig] = []

    def run(_role: str, config: WorkerConfig) -> int:
        given.append(config)
        return 0

    monkeypatch.setattr("agents.worker.run", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / MANIFEST).touch()
    settings = (
        "items.items_max=5", "predict.users_max=6", "verify.ledger_rows_max=7", "infer.queue_pairs_max=8", "state.lock_wait_ms=9",
        "serve.answers_bytes_max=10", "transport.retries_max=11", "serve.shown_rows_max=12",
    )  # fmt: skip
    line = [part for setting in settings for part in ("--set", setting)]
    done = CliRunner().invoke(app, [*line, "worker", "speculate", "--bundle", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    (config,) = given
    spec = config.speculate
    assert (config.items.items_max, spec.predict.users_max, spec.verify.ledger_rows_max) == (5, 6, 7)
    assert (config.infer.queue_pairs_max, config.state.lock_wait_ms, config.serve.answers_bytes_max) == (8, 9, 10)
    assert (config.transport.retries_max, spec.shown_rows_max) == (11, 12)

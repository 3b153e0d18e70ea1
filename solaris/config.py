"""From a settings file, the environment and flags to one frozen dataclass per section.

In:  solaris.toml (`[kafka] bootstrap = "…"`), `SOLARIS_KAFKA__BOOTSTRAP=…`, `--set kafka.bootstrap=…`; the last one wins.
Out: `Config`, from which each part takes its own section: `config.get(KafkaConfig)`. A verb that needs a few sections alone imports
no others (torch and Faust are behind some): of those only the names are checked, their values are for the worker to refuse.
Never: ignores a key that it doesn't know, takes a secret from the settings file or a flag, or prints one.

Fields that end in `_ms` or `_ms_max` also take "4h", "10min", "30s", "500ms". A field marked `metadata={"secret": True}` is read
from the environment, or from the file that the key with `_file` after it names.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import re
import tomllib
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from schemas.errors import ConfigError

# Section → the dataclass that holds it, defined where it is used. A new section is one line here.
SECTIONS: dict[str, str] = {
    "kafka": "agents.kafka:KafkaConfig",
    "transport": "agents.transport.wiring:TransportConfig",
    "state": "streams.state.rocks:StateConfig",
    "items": "streams.items:ItemsConfig",
    "predict": "streams.predict:PredictConfig",
    "verify": "streams.verify:VerifyConfig",
    "infer": "streams.dispatch:InferConfig",
    "serve": "streams.serve:ServeConfig",
}

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_FILE = Path("solaris.toml")
ENVIRONMENT_PREFIX = "SOLARIS_"
_UNITS_MS = {"ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)")

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """The sections that were asked for, each an instance of its dataclass."""

    sections: Mapping[str, Any]

    def get(self, kind: type[T]) -> T:
        """The section of this dataclass."""
        for section in self.sections.values():
            if isinstance(section, kind):
                return section
        raise AssertionError(
            f"{kind.__name__} is in no section that was loaded; SECTIONS in solaris/config.py has them all"
        )


@dataclass(frozen=True)
class _Setting:
    """One value as it was found; `where` is for the message, `secret_ok` whether a secret may stand there."""

    section: str
    key: str
    value: Any
    where: str
    secret_ok: bool = False


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
    sections: Mapping[str, type] | None = None,
    only: Collection[str] | None = None,
) -> Config:
    """Read all sources, the later winning; `overrides` are `section.key=value`. Raises `ConfigError`.

    `only`: the sections to load (default: all); the others' modules are not imported, so of their settings the names are checked.
    """
    known = SECTIONS if sections is None else sections
    kinds = _kinds(known if only is None else only) if sections is None else sections
    found = [*_from_file(file), *_from_environment(environment or {}, known), *_from_overrides(overrides)]
    values: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    for setting in found:
        if setting.section not in known:
            raise ConfigError(
                f"{setting.where}: there is no section [{setting.section}]{_nearest(setting.section, known)}"
            )
        if setting.section not in kinds:
            _check_name(setting)
            continue
        name, value = _parse(setting, kinds[setting.section])
        values[setting.section][name] = value
    return Config({name: _build(name, kind, values[name]) for name, kind in kinds.items()})


def _kinds(names: Iterable[str]) -> dict[str, type]:
    kinds = {}
    for section in names:
        module, _, name = SECTIONS[section].partition(":")
        kinds[section] = getattr(importlib.import_module(module), name)
    return kinds


def _check_name(setting: _Setting) -> None:
    """Refuse a key that the section's dataclass doesn't have, by reading its source instead of importing it."""
    module, _, name = SECTIONS[setting.section].partition(":")
    tree = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text())
    fields = [
        line.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    if setting.key not in fields:
        raise ConfigError(f"{setting.where}: there is no such key{_nearest(setting.key, fields)}")


def _from_file(file: Path | None) -> list[_Setting]:
    if file is None and not DEFAULT_FILE.is_file():
        return []
    file = file or DEFAULT_FILE
    try:
        tables = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"The settings file {file} can't be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The settings file {file} is not TOML: {error}.") from error
    settings = []
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: `{section}` stands outside of a section; write it under one, such as [kafka].")
        settings += [_Setting(section, key, value, f"{file}, [{section}] {key}") for key, value in table.items()]
    return settings


def _from_environment(environment: Mapping[str, str], sections: Iterable[str]) -> list[_Setting]:
    settings = []
    for name, value in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        section, two, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if two:
            settings.append(_Setting(section, key, value, f"environment variable {name}", secret_ok=True))
        elif section.partition("_")[0] in sections:
            raise ConfigError(f"Environment variable {name}: two underscores stand between section and key.")
    return settings


def _from_overrides(overrides: Iterable[str]) -> list[_Setting]:
    settings = []
    for text in overrides:
        name, equals, value = text.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot):
            # Only the name: what follows might be a secret that was put in the wrong place.
            raise ConfigError(f"--set {name}: write SECTION.KEY=VALUE, such as kafka.bootstrap=kafka-1:9092.")
        settings.append(_Setting(section, key, value, f"--set {name}"))
    return settings


def _parse(setting: _Setting, kind: type) -> tuple[str, Any]:
    """Field name and value in the field's type."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    secrets = {name for name, field in fields.items() if field.metadata.get("secret")}
    plain = setting.key.removesuffix("_file")
    if plain in secrets and plain != setting.key:
        return plain, _read_secret(Path(str(setting.value)), setting.where)
    if setting.key not in fields:
        known = [*fields, *(f"{name}_file" for name in secrets)]
        raise ConfigError(f"{setting.where}: there is no such key{_nearest(setting.key, known)}")
    if setting.key in secrets and not setting.secret_ok:
        raise ConfigError(
            f"{setting.where}: a secret is taken from the environment "
            f"({ENVIRONMENT_PREFIX}{setting.section.upper()}__{setting.key.upper()}) or from a file ({setting.key}_file)."
        )
    wanted = typing.get_type_hints(kind)[setting.key]
    return setting.key, _convert(setting.key, setting.value, wanted, f"{setting.where}: {setting.value!r}")


def _convert(key: str, value: Any, wanted: Any, complaint: str) -> Any:
    if key.endswith(("_ms", "_ms_max")) and isinstance(value, str) and not value.strip().lstrip("-").isdigit():
        match = _DURATION.fullmatch(value.strip())
        if not match:
            raise ConfigError(
                f"{complaint} is no duration: write 500ms, 30s, 10min, 4h, 7d or a number of milliseconds."
            )
        value = float(match[1]) * _UNITS_MS[match[2]]
        value = int(value) if value.is_integer() else value
    if typing.get_origin(wanted) is tuple and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, wanted, strict=False, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{complaint} does not fit: {error}.") from None


def _path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path) and isinstance(value, str):
        return Path(value).expanduser()
    raise NotImplementedError(kind)  # msgspec's word for "not mine": it makes its own error of it


def _read_secret(path: Path, where: str) -> str:
    try:
        return path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: the secret can't be read from {path}: {error}.") from error


def _build(section: str, kind: type, values: Mapping[str, Any]) -> Any:
    try:
        return kind(**values)
    except TypeError as error:  # a field without a default
        missing = [
            field.name
            for field in dataclasses.fields(kind)
            if field.name not in values
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if not missing:
            raise
        raise ConfigError(f"[{section}] needs {', '.join(missing)}; nothing sets it.") from error
    except ValueError as error:  # a section's own check; the core's know nothing of settings
        raise ConfigError(f"[{section}] {error}.") from error


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else f"; there are {', '.join(known)}."

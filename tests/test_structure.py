"""The rules of the house that a program can check: directions of imports, sizes, and what stands in no file."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("schemas", "models", "streams", "agents", "solaris")
CORE = LAYERS[:3]
KAFKA_CLIENTS = {"faust", "confluent_kafka", "aiokafka"}
PICKLERS = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# The edges own the clock, the environment and chance; the core gets them as arguments.
AMBIENT = re.compile(r"os\.(environ|getenv)|time\.time(_ns)?|(datetime|date)\.(now|utcnow|today)|random\.\w+")
SEEDED = {"default_rng", "Generator", "SeedSequence", "PCG64", "Philox"}
LINES_MAX = 400
# Written in pieces, so that this file passes its own test.
REGISTRIES = [
    ".".join(parts) for parts in (("pypi", "org"), ("files", "pythonhosted"), ("repo", "maven"), ("repo1", "maven"))
]
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/\w" + r"|(?<![\w.])/tm" + r"p/\w")


@cache
def tracked() -> tuple[Path, ...]:
    """Every file that is, or would be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    return tuple(path for path in map(ROOT.joinpath, names) if path.is_file())


def texts() -> Iterator[tuple[Path, str]]:
    for path in tracked():
        content = path.read_bytes()
        if b"\0" not in content[:8_000]:
            yield path.relative_to(ROOT), content.decode(errors="replace")


@cache
def modules() -> tuple[tuple[Path, str, ast.Module], ...]:
    """(path, top-level folder, syntax tree) of every Python file."""
    found = [path for path in tracked() if path.suffix == ".py"]
    return tuple((p.relative_to(ROOT), p.relative_to(ROOT).parts[0], ast.parse(p.read_text())) for p in found)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, top-level name) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path, top, tree in modules()
        if top in LAYERS
        for line, name in imports(tree)
        if name in LAYERS and LAYERS.index(name) > LAYERS.index(top)
    ]
    assert wrong == []


def test_only_agents_import_kafka_s_clients() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path, top, tree in modules()
        if top in LAYERS and top != "agents"
        for line, name in imports(tree)
        if name in KAFKA_CLIENTS
    ]
    assert wrong == []


def test_the_core_asks_no_clock_no_environment_and_no_chance() -> None:
    wrong = []
    for path, top, tree in modules():
        if top not in CORE:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            name = ast.unparse(node)
            plain = re.sub(r"^(np|numpy)\.random\.", "random.", name)
            if AMBIENT.fullmatch(plain) and plain.rpartition(".")[2] not in SEEDED:
                wrong.append(f"{path}:{node.lineno} {name}")
    assert wrong == []


def test_no_pickle_is_read() -> None:
    wrong = []
    for path, top, tree in modules():
        if top == "tests":
            continue
        wrong += [f"{path}:{line} imports {name}" for line, name in imports(tree) if name in PICKLERS]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                wrong.append(f"{path}:{node.lineno} torch.load")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                wrong.append(f"{path}:{node.lineno} allow_pickle")
    assert wrong == []


def test_a_file_is_a_step_in_the_story() -> None:
    sizes = {str(path): len((ROOT / path).read_text().splitlines()) for path, _, _ in modules()}
    assert {path: lines for path, lines in sizes.items() if lines > LINES_MAX} == {}


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path, top, tree in modules() if top in LAYERS and not ast.get_docstring(tree)]
    assert silent == []


@pytest.mark.parametrize("registry", REGISTRIES)
def test_no_registry_is_named(registry: str) -> None:
    assert [str(path) for path, text in texts() if registry in text] == []


def test_no_path_of_one_machine_is_named() -> None:
    found = [
        f"{path}:{number} {match[0]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := MACHINE_PATH.search(line)) and not (path.name == "Dockerfile" and "/root/.cache" in line)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_every_file_that_a_document_names_exists(name: str) -> None:
    document = ROOT / name
    if not document.exists():
        pytest.skip(f"{name} is not written yet")
    named = re.findall(rf"(?<![\w/])((?:{'|'.join(LAYERS)}|tests|benches|docs)/[\w/]+\.\w+)", document.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []

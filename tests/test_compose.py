"""The compose files: valid, scalable, and calling verbs that exist. No Docker needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from solaris.cli import verbs

ROOT = Path(__file__).resolve().parents[1]
FILES = ("docker-compose.yml", "docker-compose.gpu.yml")
PROCESSES = ("speculate", "infer", "serve")


def services(name: str) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load((ROOT / name).read_text())["services"]
    return found


@pytest.mark.parametrize("name", FILES)
def test_it_follows_the_compose_specification(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(ROOT / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_can_be_scaled(process: str) -> None:
    service = services("docker-compose.yml")[process]
    assert not {"container_name", "ports", "hostname"} & set(service)
    # A named volume would be shared by the replicas, and two workers on one state directory exclude each other.
    assert [mount for mount in service["volumes"] if mount["type"] == "volume" and "source" in mount] == []
    assert service["healthcheck"]["test"]
    assert service["depends_on"] == {"topics": {"condition": "service_completed_successfully"}}


def test_commands_are_verbs_of_ours() -> None:
    ours = {name: service["command"] for name, service in services("docker-compose.yml").items() if "build" in service}
    assert set(ours) == {"topics", *PROCESSES}
    assert {command[0] for command in ours.values()} <= set(verbs())


def test_the_gpu_file_only_adds_a_device_to_infer() -> None:
    (name, infer), *others = services("docker-compose.gpu.yml").items()
    plain = services("docker-compose.yml")["infer"]["command"]
    assert (name, others) == ("infer", [])
    assert infer["command"] == [*plain, "--device", "cuda"]
    assert infer["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]

"""Worker processes of one machine: starts them as a user would, watches that they live, stops them in order.

In: a bundle, a folder for state and logs, settings as environment variables. Out: processes and their stats files.
Never leaves one running: they end with this process, even where it gets SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from schemas.errors import SolarisError
from solaris.lifeline import tied

ROLES = ("speculate", "infer", "serve")
READY_S_MAX = 120.0
STOP_S_MAX = 30.0


class Workers:
    """One process a role; a context manager that stops them all at its end."""

    def __init__(self, bundle: Path, folder: Path, settings: Mapping[str, str], roles: tuple[str, ...] = ROLES) -> None:
        self._bundle, self._folder, self._settings, self._roles = bundle, folder, dict(settings), roles
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Workers:
        try:
            for role in self._roles:
                self.start(role)
        except BaseException:  # an interruption, too: `with` calls no `__exit__` for it here
            self._stop_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_all()

    def _stop_all(self) -> None:
        for role in list(self._processes):
            self.stop(role)

    def start(self, role: str) -> None:
        """Start a role's process; its output goes to ROLE.log, its counts to ROLE.json."""
        self._stats(role).unlink(missing_ok=True)
        line = [sys.executable, "-m", "solaris", "worker", role, "--bundle", str(self._bundle)]
        line += ["--stats", str(self._stats(role))]
        if role != "infer":  # it keeps no state
            line += ["--state-dir", str(self._folder / "state" / role)]
        with (self._folder / f"{role}.log").open("ab") as log:
            environment = os.environ | self._settings
            self._processes[role] = subprocess.Popen(
                tied(line), env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, role: str) -> None:
        """SIGKILL: what a crash looks like."""
        process = self._processes.pop(role)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self, role: str) -> int:
        """SIGTERM, then SIGKILL after 30 s; the exit code."""
        process = self._processes.pop(role)
        process.terminate()
        try:
            return process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def check(self) -> None:
        """Raise `SolarisError` if one has ended by itself."""
        for role, process in self._processes.items():
            if process.poll() is not None:
                raise SolarisError(f"the {role} worker ended with {process.returncode}:\n{self._tail(role)}")

    def wait_until_ready(self, timeout_s: float = READY_S_MAX) -> None:
        """Wait until every worker says that it is ready."""
        deadline = time.monotonic() + timeout_s
        while waiting := [role for role in self._processes if not self.stats(role).get("ready")]:
            self.check()
            if time.monotonic() > deadline:
                raise SolarisError(f"{', '.join(waiting)} not ready after {timeout_s:g} s:\n{self._tail(waiting[0])}")
            time.sleep(0.1)

    def stats(self, role: str) -> dict[str, Any]:
        """The worker's last counts; empty before the first."""
        try:
            counts: dict[str, Any] = json.loads(self._stats(role).read_bytes())
        except FileNotFoundError:
            return {}
        return counts

    def pid(self, role: str) -> int:
        """Process id."""
        return self._processes[role].pid

    def _stats(self, role: str) -> Path:
        return self._folder / f"{role}.json"

    def _tail(self, role: str) -> str:
        return "\n".join((self._folder / f"{role}.log").read_text(errors="replace").splitlines()[-15:])

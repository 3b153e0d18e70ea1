"""Workers as processes of their own, forked from one that has done the imports; each runs the command line that a user would type.

In: a role, settings as environment variables, folders. Out: processes with logs, exit codes and stats files. Importing torch takes
seconds of a core, and these tests start dozens of workers: that is all that they share. What follows is the command's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from solaris.lifeline import tie

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.integration.preload"])

READY_S_MAX = 90.0
STOP_S_MAX = 40.0


def until(true: Callable[[], Any], timeout_s: float = 60.0, what: str | Callable[[], str] = "") -> None:
    """Wait until it is true; AssertionError with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what() if callable(what) else what}")
        time.sleep(0.05)


def _command(line: list[str], environment: Mapping[str, str], log: str) -> None:
    tie(os.getppid())  # the fork server, which ends with the tests
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    sys.argv = ["solaris", *line]
    from solaris.cli import main

    main()


class Worker:
    """One process: `solaris worker ROLE` on a bundle, with its log, its stats and (but for infer) its state folder."""

    def __init__(self, role: str, name: str, bundle: Path, folder: Path, settings: Mapping[str, str]) -> None:
        self.role, self.name, self.state = role, name, folder / name
        self._log, self._stats = folder / f"{name}.log", folder / f"{name}.json"
        self._stats.unlink(missing_ok=True)
        line = ["worker", role, "--bundle", str(bundle), "--stats", str(self._stats)]
        if role != "infer":
            line += ["--state-dir", str(self.state)]
        self._process = _CONTEXT.Process(target=_command, args=(line, dict(settings), str(self._log)), daemon=True)
        self._process.start()

        self._ending = False

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def died(self) -> int | None:
        """The exit code of a worker that nobody stopped; None while all is well."""
        return None if self._ending else self._process.exitcode

    @property
    def facts(self) -> dict[str, Any]:
        """The last stats file; empty before the first."""
        try:
            facts: dict[str, Any] = json.loads(self._stats.read_bytes())
        except FileNotFoundError:
            return {}
        return facts

    @property
    def counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = self.facts.get("counts", {})
        return counts

    def log(self) -> str:
        """What it said."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def wait_until_ready(self) -> None:
        """AssertionError with its log if it ends, or isn't ready in time."""
        until(lambda: self.facts.get("ready") or not self.alive, READY_S_MAX, lambda: f"{self.name}:\n{self.log()}")
        assert self.alive, f"{self.name} ended with {self._process.exitcode}:\n{self.log()}"

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        self._ending = True
        self._process.kill()
        self._process.join(STOP_S_MAX)

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self._ending = True
        self._process.terminate()
        return self.ended(STOP_S_MAX)

    def ended(self, timeout_s: float) -> int:
        """Wait for its end; its exit code."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"{self.name} did not end within {timeout_s:g} s:\n{self.log()}"
        return code

"""Where a broker lives: the files of its directory, the directory's lock, and the ports that it may have.

In:  a data directory; an address.
Out: paths, a lock that a child process can inherit, ports that are free now.
Never: starts or stops anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import BrokerError
from solaris.broker.properties import Ports

CONNECT_TIMEOUT_S = 2.0
LOCK_PATIENCE_S = 0.5  # `in_use` holds the lock for a moment, and so does a process that is just ending


@dataclass(frozen=True)
class Place:
    """A broker's directory and what lies where in it."""

    data_dir: Path

    @property
    def lock(self) -> Path:
        return self.data_dir / "lock"

    @property
    def state(self) -> Path:
        """Process and ports of the broker that holds the lock."""
        return self.data_dir / "broker.json"

    @property
    def properties(self) -> Path:
        return self.data_dir / "server.properties"

    @property
    def log4j(self) -> Path:
        return self.data_dir / "log4j2.properties"

    @property
    def arguments(self) -> Path:
        return self.data_dir / "java.args"

    @property
    def log(self) -> Path:
        return self.data_dir / "server.log"

    @property
    def console(self) -> Path:
        """What the JVM itself printed."""
        return self.data_dir / "console.log"

    @property
    def cluster_id(self) -> str | None:
        """What the directory was formatted with; None if it is new."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.data_dir / "metadata" / "meta.properties").read_text().splitlines()
            return next((line.partition("=")[2] for line in lines if line.startswith("cluster.id=")), None)
        return None

    @property
    def in_use(self) -> bool:
        """Whether a broker, whoever started it, runs on the directory."""
        try:
            with self.lock.open("rb") as file:
                return not _lock(file.fileno(), fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def taken(self) -> Iterator[int]:
        """The directory's lock, as a descriptor for the child to inherit: it is free again when the child is gone."""
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + LOCK_PATIENCE_S
            while not _lock(fd, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise BrokerError(
                        f"A broker already runs on {self.data_dir}: stop it (`solaris broker stop --data-dir "
                        f"{self.data_dir}`) or choose another directory."
                    )
                time.sleep(LOCK_PATIENCE_S / 10)
            yield fd
        finally:
            os.close(fd)

    def log_tail(self, lines_max: int) -> str:
        """The last lines of what the JVM printed and of Kafka's log."""
        return "\n".join(part for part in (_tail(self.console, lines_max), _tail(self.log, lines_max)) if part)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def free_ports(host: str, port: int) -> Ports:
    """Three ports that are free now; the client's is `port` if it isn't 0."""
    with contextlib.ExitStack() as held:
        numbers = []
        for address, wanted in ((host, port), ("127.0.0.1", 0), ("127.0.0.1", 0)):
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, wanted))
            except OSError as error:
                raise BrokerError(
                    f"Port {wanted} on {address} can't be had ({error.strerror}): choose another with --port, "
                    "0 for any free one, or stop what uses it."
                ) from error
            numbers.append(probe.getsockname()[1])
        return Ports(*numbers)


def accepts(host: str, port: int) -> bool:
    """Whether anything listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S):
        return True
    return False


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read: it may hold a secret."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def _tail(path: Path, lines_max: int) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines_max:])
    except FileNotFoundError:
        return ""

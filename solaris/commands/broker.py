"""Run a real Apache Kafka on this machine: start, stop, status."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from schemas.errors import BrokerError, UsageError
from solaris.broker import DEFAULT_DATA_DIR, Broker, BrokerOptions, BrokerSecurity
from solaris.commands import emit

app = typer.Typer(
    no_args_is_help=True,
    help="""Run a real Apache Kafka on this machine, without Docker and without a Java of your own.

    Examples:

        solaris broker start --detach          port 9092, data under .solaris/broker
        solaris broker start --port 0 --json   any free port, named in the JSON line
        solaris broker stop

    Exit codes: 0 done, 1 it did not start, answer or stop (or, for status, it does not run), 2 a wrong call.
    """,
)

DataDir = Annotated[Path, typer.Option(help="Where its data lies; one directory, one broker.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON line instead of a sentence.")]

DEFAULT_PORT = 9092


@app.command()
def start(
    data_dir: DataDir = DEFAULT_DATA_DIR,
    port: Annotated[int, typer.Option(help="Port for clients; 0 picks a free one.", min=0, max=65535)] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Address to bind and to advertise.")] = "127.0.0.1",
    heap_mb: Annotated[int, typer.Option(help="Java heap at most, in MB.", min=64)] = 256,
    detach: Annotated[
        bool, typer.Option("--detach/--foreground", help="Leave it running, or stop it at Ctrl-C.")
    ] = False,
    username: Annotated[str | None, typer.Option(help="Ask clients for SASL SCRAM-SHA-256 as this user.")] = None,
    password_file: Annotated[Path | None, typer.Option(help="File that holds the user's password.")] = None,
    tls_keystore: Annotated[
        Path | None, typer.Option(help="PEM: private key (PKCS#8), then certificates; TLS on.")
    ] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="PEM: ask clients for a certificate signed by it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Start it and wait until it answers (about 4 s; the very first start downloads 44 MB)."""
    security = _security(username, password_file, tls_keystore, tls_client_ca)
    options = BrokerOptions(host=host, heap_mb_max=heap_mb, security=security)
    broker = Broker.start(data_dir, port=port, options=options)
    interrupted = (
        None if detach else _interrupted()
    )  # before the line that says it runs: whoever reads it may interrupt
    facts = {"bootstrap": broker.bootstrap, "pid": broker.pid, "log": str(broker.log_path), "running": True}
    hint = f"stop it with `solaris broker stop --data-dir {data_dir}`" if detach else "Ctrl-C stops it"
    emit(
        facts,
        f"Kafka answers at {broker.bootstrap} (process {broker.pid}, log {broker.log_path}); {hint}.",
        as_json=as_json,
    )
    if interrupted is None:
        broker.detach()
    else:
        _stay_until(interrupted, broker)


@app.command()
def stop(data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False) -> None:
    """Stop it in order; stopping what does not run is no error."""
    broker = Broker.attach(data_dir)
    if broker is not None:
        broker.stop()
    sentence = f"Stopped the broker on {data_dir}." if broker else f"No broker runs on {data_dir}."
    emit({"stopped": broker is not None, "running": False}, sentence, as_json=as_json)


@app.command()
def status(data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False) -> None:
    """Say whether it runs and where; exit code 1 if it does not."""
    broker = Broker.attach(data_dir)
    if broker is None:
        emit({"running": False}, f"No broker runs on {data_dir}.", as_json=as_json)
        raise typer.Exit(1)
    facts = {"bootstrap": broker.bootstrap, "pid": broker.pid, "log": str(broker.log_path), "running": True}
    emit(facts, f"Kafka runs at {broker.bootstrap} (process {broker.pid}, log {broker.log_path}).", as_json=as_json)


def _security(
    username: str | None, password_file: Path | None, keystore: Path | None, client_ca: Path | None
) -> BrokerSecurity:
    if (username is None) != (password_file is None):
        raise UsageError("--username and --password-file belong together: give both or neither.")
    if client_ca and not keystore:
        raise UsageError("--tls-client-ca needs --tls-keystore: there are no client certificates without TLS.")
    for path in (password_file, keystore, client_ca):
        if path is not None and not path.is_file():
            raise UsageError(f"The file {path} does not exist.")
    password = password_file.read_text().strip() if password_file else None
    return BrokerSecurity(username=username, password=password, keystore_pem=keystore, client_ca_pem=client_ca)


def _interrupted() -> threading.Event:
    """Set by Ctrl-C and SIGTERM from now on."""
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    return asked


def _stay_until(interrupted: threading.Event, broker: Broker) -> None:
    while not interrupted.wait(0.5):
        if not broker.alive:
            raise BrokerError(f"The broker ended by itself. Its last lines:\n{broker.log_tail()}")
    broker.stop()

"""The broker's parts that need no Java: the jar list, the files that Kafka reads, and what is refused before a start."""

from __future__ import annotations

import hashlib
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import BrokerError
from solaris.broker import Broker, BrokerOptions, BrokerSecurity
from solaris.broker.jars import KAFKA, Jar, _fetch, read_lock
from solaris.broker.properties import Ports, java_argument_file, server_properties

PORTS = Ports(client=1001, controller=1002, internal=1003)


class FakeMaven:
    """Stands for jgo's context: one artifact at `path`, whose download writes `content`."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.cached_path = path
        self.content = content
        self.downloads = 0

    def project(self, *_: str) -> FakeMaven:
        return self

    at_version = artifact = project

    def resolve(self) -> Path:
        self.downloads += 1
        self.cached_path.write_bytes(self.content)
        return self.cached_path


def jar(content: bytes) -> Jar:
    return Jar("group", "artifact", "1.0", hashlib.sha256(content).hexdigest())


def test_the_list_names_kafka_its_logging_provider_and_a_digest_each() -> None:
    jars = read_lock()
    versions = {one.artifact: one.version for one in jars}
    assert jars[0].coordinate == KAFKA
    assert versions["log4j-slf4j-impl"] == versions["log4j-core"]
    assert versions["kafka-clients"] == KAFKA.rpartition(":")[2]
    assert all(re.fullmatch("[0-9a-f]{64}", one.sha256) for one in jars)
    assert len(versions) == len(jars)


def test_a_whole_jar_is_not_downloaded_again(tmp_path: Path) -> None:
    maven = FakeMaven(tmp_path / "a.jar", b"good")
    maven.cached_path.write_bytes(b"good")
    assert _fetch(maven, jar(b"good")) == maven.cached_path
    assert maven.downloads == 0


def test_a_torn_jar_is_fetched_again(tmp_path: Path) -> None:
    maven = FakeMaven(tmp_path / "a.jar", b"good")
    maven.cached_path.write_bytes(b"go")
    assert _fetch(maven, jar(b"good")).read_bytes() == b"good"


def test_a_jar_that_is_not_the_locked_one_is_refused_and_removed(tmp_path: Path) -> None:
    maven = FakeMaven(tmp_path / "a.jar", b"evil")
    with pytest.raises(BrokerError, match=r"group:artifact:1\.0 has sha256"):
        _fetch(maven, jar(b"good"))
    assert not maven.cached_path.exists()


def test_a_jar_that_cannot_be_had_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    class Down(FakeMaven):
        def resolve(self) -> Path:
            self.cached_path.write_bytes(b"ha")
            raise RuntimeError("no route")

    maven = Down(tmp_path / "a.jar", b"")
    with pytest.raises(BrokerError, match="no route"):
        _fetch(maven, jar(b"good"))
    assert not maven.cached_path.exists()


def properties(**options: Any) -> dict[str, str]:
    text = server_properties(BrokerOptions(**options), Path("/data"), PORTS)
    return dict(line.split("=", 1) for line in text.splitlines())


def test_a_plain_broker_listens_on_this_machine_only() -> None:
    settings = properties()
    assert settings["listeners"] == "CLIENT://127.0.0.1:1001,CONTROLLER://127.0.0.1:1002"
    assert settings["advertised.listeners"] == "CLIENT://127.0.0.1:1001"
    assert settings["metadata.log.dir"] != settings["log.dirs"]
    assert settings["auto.create.topics.enable"] == "false"


def test_clients_of_a_secured_broker_have_no_plain_listener_on_the_client_port() -> None:
    security = BrokerSecurity("u", "p", keystore_pem=Path("/k.pem"), client_ca_pem=Path("/ca.pem"))
    settings = properties(security=security, host="10.0.0.5")
    assert "CLIENT:SASL_SSL" in settings["listener.security.protocol.map"]
    assert settings["listeners"] == "CLIENT://10.0.0.5:1001,CONTROLLER://127.0.0.1:1002,INTERNAL://127.0.0.1:1003"
    assert settings["inter.broker.listener.name"] == "INTERNAL"
    assert settings["listener.name.client.ssl.client.auth"] == "required"


def test_overrides_win() -> None:
    assert properties(overrides={"num.partitions": "9"})["num.partitions"] == "9"


def test_the_password_is_in_no_repr_and_in_no_properties() -> None:
    options = BrokerOptions(security=BrokerSecurity("user", "s3cret"))
    assert "s3cret" not in repr(options) + server_properties(options, Path("/data"), PORTS)


def test_java_arguments_survive_spaces_quotes_and_backslashes() -> None:
    assert java_argument_file(["a b", 'say "x"', "c\\d"]) == '"a b"\n"say \\"x\\""\n"c\\\\d"\n'


def test_a_port_that_is_taken_is_refused_before_java_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solaris.broker.process.class_path", list)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BrokerError, match=f"Port {port} on 127.0.0.1 can't be had"):
            Broker.start(tmp_path, port=port)


def test_nothing_runs_on_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert Broker.attach(tmp_path / "absent") is None

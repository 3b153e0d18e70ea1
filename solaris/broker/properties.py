"""From the broker's options to the files that Kafka reads: server.properties and log4j2.properties.

In:  `BrokerOptions`, the data directory, the ports that were found free.
Out: text. Never: starts, binds or writes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

SCRAM = "SCRAM-SHA-256"


@dataclass(frozen=True)
class BrokerSecurity:
    """What clients must show. The broker's own listeners stay plain and on 127.0.0.1: it is for one machine.

    `keystore_pem` holds the private key (PKCS#8, not encrypted) and then its certificate chain: TLS is on if given.
    `client_ca_pem` asks clients for a certificate signed by it (mutual TLS).
    `username` and `password` together ask for SASL SCRAM-SHA-256.
    """

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    keystore_pem: Path | None = None
    client_ca_pem: Path | None = None

    @property
    def protocol(self) -> str:
        transport = "SSL" if self.keystore_pem else "PLAINTEXT"
        if self.username:
            return f"SASL_{transport}"
        return transport


@dataclass(frozen=True)
class BrokerOptions:
    """How the broker is to run; `overrides` are lines of server.properties that win over ours."""

    host: str = "127.0.0.1"
    heap_mb_max: int = 256
    partitions_default: int = 4
    security: BrokerSecurity = BrokerSecurity()
    overrides: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Ports:
    """TCP ports: for clients, for the controller, and for the broker's calls to itself when clients need TLS or SASL."""

    client: int
    controller: int
    internal: int


def server_properties(options: BrokerOptions, data_dir: Path, ports: Ports) -> str:
    """One node that is broker and controller, tuned to be small and to come back fast."""
    host, security = options.host, options.security
    secured = security.protocol != "PLAINTEXT"
    listeners = {"CLIENT": ports.client, "CONTROLLER": ports.controller}
    protocols = {"CLIENT": security.protocol, "CONTROLLER": "PLAINTEXT"}
    if secured:
        listeners["INTERNAL"] = ports.internal
        protocols["INTERNAL"] = "PLAINTEXT"
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{ports.controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": ",".join(f"{n}://{host if n == 'CLIENT' else '127.0.0.1'}:{p}" for n, p in listeners.items()),
        "advertised.listeners": ",".join(
            f"{n}://{host if n == 'CLIENT' else '127.0.0.1'}:{p}" for n, p in listeners.items() if n != "CONTROLLER"
        ),
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        "inter.broker.listener.name": "INTERNAL" if secured else "CLIENT",
        "log.dirs": str(data_dir / "log"),
        # Apart from log.dirs: a failed or deleted data directory must not take the cluster's metadata with it.
        "metadata.log.dir": str(data_dir / "metadata"),
        "num.partitions": str(options.partitions_default),
        "auto.create.topics.enable": "false",  # a misspelt topic is an error, not a new topic
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",  # lets a worker that replaces a killed one begin sooner than after 6 s
        # After a SIGKILL the controller waits for the old session to end: 12 s with the defaults, 3 s with these.
        "broker.session.timeout.ms": "1000",
        "broker.heartbeat.interval.ms": "200",
        "log.cleaner.dedupe.buffer.size": "4194304",  # 128 MB by default, half of our heap
        **_security_properties(security),
        **options.overrides,
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def _security_properties(security: BrokerSecurity) -> dict[str, str]:
    settings: dict[str, str] = {}
    if security.username:
        prefix = f"listener.name.client.{SCRAM.lower()}"
        login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        settings |= {"sasl.enabled.mechanisms": SCRAM, f"{prefix}.sasl.jaas.config": login}
    if security.keystore_pem:
        settings |= {
            "listener.name.client.ssl.keystore.type": "PEM",
            "listener.name.client.ssl.keystore.location": str(security.keystore_pem.resolve()),
        }
    if security.client_ca_pem:
        settings |= {
            "listener.name.client.ssl.truststore.type": "PEM",
            "listener.name.client.ssl.truststore.location": str(security.client_ca_pem.resolve()),
            "listener.name.client.ssl.client.auth": "required",
        }
    return settings


def log4j_properties(log_file: Path) -> str:
    """Log to one file of at most 10 MB, three old ones kept."""
    return f"""\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {log_file}
appender.file.filePattern = {log_file}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{ISO8601}} %p %m (%c{{1}})%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""


def java_argument_file(arguments: list[str]) -> str:
    """Arguments for `java @file`: keeps secrets and a long class path off the command line that `ps` shows."""
    quoted = (argument.replace("\\", "\\\\").replace('"', '\\"') for argument in arguments)
    return "".join(f'"{argument}"\n' for argument in quoted)

"""TLS and SASL against a real broker, through the settings of both clients."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from agents.kafka import KafkaConfig, TopicAdmin, faust_settings
from schemas.errors import FatalError
from schemas.topics import EVENTS
from solaris.broker import Broker, BrokerOptions, BrokerSecurity

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="a certificate is made with openssl, which is not here"
)

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(150), needs_openssl]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaConfig]:
    """A broker that asks for SASL over TLS, and the settings that get in."""
    folder = tmp_path_factory.mktemp("secured")
    key, certificate, keystore = folder / "key.pem", folder / "cert.pem", folder / "keystore.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    keystore.write_text(key.read_text() + certificate.read_text())
    security = BrokerSecurity("solaris", 'pa"ss word', keystore_pem=keystore)
    with Broker.start(folder / "data", options=BrokerOptions(security=security)) as running:
        yield KafkaConfig(
            bootstrap=running.bootstrap,
            security_protocol="SASL_SSL",
            sasl_username=security.username,
            sasl_password=security.password,
            ssl_ca_location=certificate,
        )


def test_librdkafka_gets_in(secured: KafkaConfig) -> None:
    assert TopicAdmin(secured).ensure([EVENTS], partitions=2) == {"solaris.events": 2}


def test_faust_s_client_gets_in(secured: KafkaConfig) -> None:
    from aiokafka.admin import AIOKafkaAdminClient
    from faust.transport.drivers.aiokafka import credentials_to_aiokafka_auth

    async def topics() -> list[str]:
        access = credentials_to_aiokafka_auth(faust_settings(secured)["broker_credentials"])
        client = AIOKafkaAdminClient(bootstrap_servers=secured.bootstrap, **access)
        await client.start()
        try:
            return list(await client.list_topics())
        finally:
            await client.close()

    assert isinstance(asyncio.run(topics()), list)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sasl_password": "wrong"}, "(?i)authentication"),
        ({"ssl_ca_location": None}, "(?i)certificate"),
        ({"security_protocol": "PLAINTEXT"}, "PLAINTEXT"),
    ],
)
def test_who_may_not_get_in_is_told_why(secured: KafkaConfig, change: dict[str, str], said: str) -> None:
    with pytest.raises(FatalError, match=said):
        TopicAdmin(dataclasses.replace(secured, **change), timeout_s=3).partitions()  # type: ignore[arg-type]

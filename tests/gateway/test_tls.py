"""The gateway's certificate: checked at the start, and read again when it changes, as those of the services."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from cryptography import x509

from gateway.__main__ import main
from gateway.server import GatewayServer
from gateway.settings import GatewaySettings
from specdec.security import dev_ca
from specdec.telemetry.prometheus import Scrape
from testing.certificates import files


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    dev_ca.make(directory)
    return directory


@pytest.mark.parametrize(
    ("owner", "spoilt", "words"),
    [
        ("gateway", "expired", "expired at 20"),
        ("gateway", "key", "is not the key of"),
        ("target", "", "is issued for target"),
        ("draft", "", "is issued for draft"),
    ],
)
def test_a_certificate_that_is_none_for_a_gateway_ends_it_at_the_start(
    owner: str,
    spoilt: str,
    words: str,
    certificates: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch,
) -> None:
    pki = tmp_path / "pki"
    shutil.copytree(certificates, pki)
    if spoilt == "expired":
        dev_ca.make(pki, days=-1)
    if spoilt == "key":
        shutil.copy(pki / "draft" / dev_ca.KEY, pki / owner / dev_ca.KEY)
    flags = [f"--{name.replace('_', '-')}={file}" for name, file in files(pki, owner).items()]
    monkeypatch.setattr("sys.argv", ["gateway", "--orchestrator", "127.0.0.1:1", *flags])
    monkeypatch.setattr("specdec.telemetry.setup.set_up", lambda *_: None)
    monkeypatch.setattr("specdec.transport.rpc.signalled", AsyncMock())  # what starts ends at once
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def serial(port: int, ca: Path) -> int:
    """Of the certificate that the gateway has now."""
    context = ssl.create_default_context(cafile=ca)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        data = connection.getpeercert(binary_form=True)
    assert data is not None
    return x509.load_der_x509_certificate(data).serial_number


async def test_a_changed_certificate_serves_the_next_connection(certificates: Path, tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    shutil.copytree(certificates, pki)
    ca = pki / "ca" / dev_ca.CERT

    server = GatewayServer(GatewaySettings(orchestrator=["127.0.0.1:1"], **files(pki, "gateway")), Scrape())

    async def served() -> int:
        return await asyncio.to_thread(serial, server.port, ca)

    await server.start()
    try:
        first = await served()
        assert await served() == first
        shutil.copy(pki / "draft" / dev_ca.KEY, pki / "gateway" / dev_ca.KEY)
        assert await served() == first, "one file of two: the last valid pair stays"
        dev_ca.make(pki)
        renewed = await served()
        assert renewed != first
        dev_ca.make(pki, days=-1)
        assert await served() == renewed
    finally:
        await server.stop()

"""The probe of a container: `specdec health` without an address, in the environment of the service."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from specdec.cli.health_probe import own_health
from specdec.security import dev_ca as certificates
from testing.certificates import files
from tests.contract.over_tls import PATIENCE_S, target


async def health(**environment: str) -> tuple[int, str]:
    """Exit status and output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specdec.cli.main", "health"),
        env=clean | {f"SPECDEC_{name}": value for name, value in environment.items()},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return process.returncode or 0, said.decode()


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Certificates as a real CA makes them: for the service's name, not for loopback."""
    monkeypatch.setattr(certificates, "_LOCAL", ())
    certificates.make(tmp_path)
    return tmp_path


@pytest.mark.slow
async def test_a_service_with_tls_is_asked_in_the_clear_or_by_its_certificates_name(foreign: Path) -> None:
    async with target(foreign, health_port=0) as server:
        own = {name.upper(): file for name, file in files(foreign, "target").items()}
        environment = {"HOST": "0.0.0.0", "PORT": str(server.port), **own}
        both = (environment, environment | {"HEALTH_PORT": str(server.health_port)})
        assert await asyncio.gather(*(health(**each) for each in both)) == [(0, "SERVING\n")] * 2
        server._server.set_serving(False)
        assert await asyncio.gather(*(health(**each) for each in both)) == [(1, "NOT_SERVING\n")] * 2


@pytest.mark.slow
async def test_without_any_port_it_says_what_is_missing() -> None:
    said = "specdec: neither an address is given nor SPECDEC_HEALTH_PORT or SPECDEC_PORT set\n"
    assert await health() == (2, said)


@pytest.mark.parametrize(
    ("host", "asked"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("[::]", "[::1]"), ("::1", "[::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_what_is_listened_on_is_called_by_an_address_that_can_be(host: str, asked: str) -> None:
    assert own_health({"SPECDEC_HOST": host, "SPECDEC_PORT": "5"}, lambda: None) == (f"{asked}:5", None, "")

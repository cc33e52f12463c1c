"""The probe of the gateway's image asks as the gateway serves: with TLS where it has a certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.probe import answers
from specdec.security import dev_ca as certificates
from testing.certificates import files
from tests.gateway.conftest import serving


@pytest.mark.parametrize("tls", [False, True])
async def test_it_is_answered_by_a_gateway_alone(tls: bool, tmp_path: Path) -> None:
    certificates.make(tmp_path)
    own = files(tmp_path, "gateway") if tls else {}
    async with serving(gateway=own) as running:
        environment = {"SPECDEC_PORT": str(running.gateway.port)} | {
            f"SPECDEC_{name.upper()}": value for name, value in own.items()
        }
        assert await asyncio.to_thread(answers, environment)
        nothing = {**environment, "SPECDEC_PORT": "1"}
        assert not await asyncio.to_thread(answers, nothing)

"""The examples of docs/clients.md run as they are, at a deployment on other ports."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from tests.checkout import ROOT
from tests.gateway.conftest import serving

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "clients.md").read_text(), re.DOTALL)


@pytest.mark.slow
async def test_every_example_runs() -> None:
    assert len(EXAMPLES) >= 3
    async with serving(context_length=1024) as running:
        for example in EXAMPLES:
            orchestrator = f"127.0.0.1:{running.cluster.orchestrator.port}"
            program = example.replace("127.0.0.1:50050", orchestrator).replace("http://127.0.0.1:8000", running.url)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", program),
                cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0, err.decode()
            assert len(out) > 20

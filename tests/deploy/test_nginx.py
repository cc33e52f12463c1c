"""The lines of docs/serving.md for nginx, as it reads them itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from specdec.cli.processes import free_ports
from tests.checkout import ROOT
from tests.gateway.conftest import serving

PAGE = (ROOT / "docs" / "serving.md").read_text()
[LOCATION] = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
USER = "user root;" if os.geteuid() == 0 else ""
CONFIG = """daemon off; {user} pid {directory}/pid; error_log stderr; worker_processes 1;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
    server {{ listen 127.0.0.1:{port}; {location} }}
}}
"""


@asynccontextmanager
async def nginx(directory: Path, location: str) -> AsyncIterator[httpx.AsyncClient]:
    assert NGINX is not None
    [port] = free_ports(1)
    config = directory / "nginx.conf"
    config.write_text(CONFIG.format(user=USER, directory=directory, port=port, location=location))
    process = await asyncio.create_subprocess_exec(NGINX, "-p", str(directory), "-c", str(config))
    headers = {"host": "llm.example.com"}
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as http:
            async with asyncio.timeout(20):
                while True:
                    try:
                        await http.get("/")
                        break
                    except httpx.ConnectError:
                        assert process.returncode is None, "it does not read its lines"
                        await asyncio.sleep(0.05)
            yield http
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
@pytest.mark.parametrize("strips", [False, True])
async def test_nginx_passes_on_requests_and_streams(tmp_path: Path, strips: bool) -> None:
    settings = {"root_path": "/llm", "allowed_hosts": "llm.example.com"}
    async with serving(pass_s=0.05, gateway=settings) as running:
        upstream = f"http://127.0.0.1:{running.gateway.port}{'/' if strips else ''}"
        location = LOCATION.replace("http://127.0.0.1:8000", upstream)
        async with nginx(tmp_path, location) as http:
            assert (await http.get("/llm/v1/models")).status_code == 200
            assert (await http.get("/llm/", follow_redirects=True)).status_code == 200
            body = {"prompt": "a", "max_tokens": 40, "stream": True, "num_draft_tokens": 0}
            async with http.stream("POST", "/llm/v1/completions", json=body) as response:
                clock = asyncio.get_running_loop().time
                times = [(clock(), line) async for line in response.aiter_lines() if line]
            assert times[-1][1] == "data: [DONE]"
            assert times[-1][0] - times[0][0] > 1.0, "events come when they are sent"
            long = json.dumps({"prompt": "a", "max_tokens": 1, "user": "a" * 3_000_000})
            assert (await http.post("/llm/v1/completions", content=long)).status_code == 200

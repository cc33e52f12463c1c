"""A gateway beside the orchestrator, in a process of its own: HTTP takes no time of the loop that drives rounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

from orchestrator.settings import OrchestratorSettings

_OTHER_PORTS = ("SPECDEC_METRICS_PORT", "SPECDEC_HEALTH_PORT")
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@contextlib.asynccontextmanager
async def gateway(settings: OrchestratorSettings, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs until the end of the context, and then lets running answers end. ``port``: of this orchestrator.

    It has the orchestrator's host, certificates and log; its other settings come from the environment.
    """
    host = _ANY_HOST.get(settings.host, settings.host)
    flags = {
        "host": settings.host,
        "port": settings.http_port,
        "orchestrator": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "tls-cert": settings.tls_cert,
        "tls-key": settings.tls_key,
        "tls-ca": settings.tls_ca,
        "log-level": settings.log_level,
        "shutdown-grace-s": settings.shutdown_grace_s,
    }
    command = [sys.executable, "-m", "gateway", *(f"--{name}={value}" for name, value in flags.items())]
    command += ["--insecure"] if settings.insecure else []
    environment = {name: value for name, value in os.environ.items() if name not in _OTHER_PORTS}
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), settings.shutdown_grace_s + 1)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

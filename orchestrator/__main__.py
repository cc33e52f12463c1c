"""``python -m orchestrator --target HOST:PORT --draft HOST:PORT --tokenizer PATH``: serve generation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator
from functools import partial

import uvloop

from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.core.settings import parse
from specdec.server.process import freeze_garbage
from specdec.server.process_group import serve_by_several, signalled
from specdec.telemetry import setup as telemetry

log = logging.getLogger(__name__)

_OTHER_PORTS = ("SPECDEC_METRICS_PORT", "SPECDEC_HEALTH_PORT")
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


async def serve(settings: OrchestratorSettings) -> None:
    server = OrchestratorServer(settings)
    await server.start()
    server.prepare()
    freeze_garbage()
    log.info("serving", extra={"address": settings.address(server.port)})
    try:
        await _until_signalled(settings, server.port)
    finally:
        log.info("draining")
        await server.stop(settings.shutdown_grace_s)
        log.info("stopped")


async def _until_signalled(settings: OrchestratorSettings, port: int) -> None:
    """Until a signal to end. Raises OSError if the gateway ends before."""
    if settings.http_port is None:
        await signalled(settings)
        return
    async with gateway(settings, port) as process:
        waits = [asyncio.create_task(signalled(settings)), asyncio.create_task(process.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if process.returncode is not None and not waits[0].done():
            raise OSError(f"the gateway at http_port {settings.http_port} ended with status {process.returncode}")


@contextlib.asynccontextmanager
async def gateway(settings: OrchestratorSettings, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A gateway in a process of its own: HTTP takes no time of the loop that drives rounds. It runs until the end of
    the context, and then lets running answers end. ``port``: of this orchestrator.

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


def main() -> None:
    settings = parse(OrchestratorSettings, sys.argv[1:], "orchestrator")
    try:
        if settings.processes > 1:
            telemetry.set_up_logs("specdec-orchestrator", settings)
            uvloop.run(serve_by_several("orchestrator", settings, partial(_until_signalled, settings)))
        else:
            telemetry.set_up("specdec-orchestrator", settings)
            uvloop.run(serve(settings))
    except ValueError as error:
        print(f"specdec orchestrator: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except OSError as error:
        print(f"specdec orchestrator: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()

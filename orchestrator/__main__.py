"""``python -m orchestrator --target HOST:PORT --draft HOST:PORT --tokenizer PATH``: serve generation."""

from __future__ import annotations

import asyncio
import logging
import sys

import uvloop

from orchestrator.api.http import gateway
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.core.settings import parse
from specdec.server.process import freeze_garbage
from specdec.telemetry import setup as telemetry
from specdec.transport import rpc

log = logging.getLogger(__name__)


async def serve(settings: OrchestratorSettings) -> None:
    server = OrchestratorServer(settings)
    await server.start()
    server.prepare()
    freeze_garbage()
    log.info("serving", extra={"address": settings.address(server.port)})
    try:
        await _until_told(settings, server.port)
    finally:
        log.info("draining")
        await server.stop(settings.shutdown_grace_s)
        log.info("stopped")


async def _until_told(settings: OrchestratorSettings, port: int) -> None:
    """Until a signal to end. Raises OSError if the gateway ends before."""
    if settings.http_port is None:
        await rpc.signalled()
        return
    async with gateway(settings, port) as process:
        waits = [asyncio.create_task(rpc.signalled()), asyncio.create_task(process.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if process.returncode is not None and not waits[0].done():
            raise OSError(f"the gateway at http_port {settings.http_port} ended with status {process.returncode}")


def main() -> None:
    settings = parse(OrchestratorSettings, sys.argv[1:], "orchestrator")
    try:
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

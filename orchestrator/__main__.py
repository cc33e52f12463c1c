"""``python -m orchestrator --target HOST:PORT --draft HOST:PORT --tokenizer PATH``: serve generation."""

from __future__ import annotations

import logging
import sys

import uvloop

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
    freeze_garbage()
    log.info("serving", extra={"address": settings.address(server.port)})
    await rpc.signalled()
    log.info("draining")
    await server.stop(settings.shutdown_grace_s)
    log.info("stopped")


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

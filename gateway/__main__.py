"""``python -m gateway --orchestrator HOST:PORT --port 8000``: serve OpenAI's API over HTTP."""

from __future__ import annotations

import logging
import sys

import uvloop

from gateway.settings import GatewaySettings
from specdec.core.settings import lacks, parse
from specdec.server.process import freeze_garbage
from specdec.server.process_group import serve_by_several, signalled
from specdec.telemetry import setup as telemetry
from specdec.telemetry.prometheus import Scrape

log = logging.getLogger(__name__)


async def serve(settings: GatewaySettings, scrape: Scrape) -> None:
    # Imported here, since what it needs is an extra.
    from gateway.server import GatewayServer

    server = GatewayServer(settings, scrape)
    await server.start()
    freeze_garbage()
    log.info("serving", extra={"address": settings.address(server.port)})
    await signalled(settings)
    log.info("draining")
    await server.stop()
    log.info("stopped")


def main() -> None:
    settings = parse(GatewaySettings, sys.argv[1:], "gateway")
    try:
        if settings.processes > 1:
            telemetry.set_up_logs("specdec-gateway", settings)
            uvloop.run(serve_by_several("gateway", settings, lambda _: signalled(settings)))
        else:
            scrape = Scrape()
            telemetry.set_up("specdec-gateway", settings, scrape)
            uvloop.run(serve(settings, scrape))
    except (ValueError, ImportError) as error:
        print(f"specdec gateway: {lacks(error) if isinstance(error, ImportError) else error}", file=sys.stderr)
        raise SystemExit(2) from error
    except OSError as error:
        print(f"specdec gateway: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()

"""The gateway as a server: a socket, the application, an orderly end. Knows uvicorn; does not know requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn

from gateway.app import Gateway
from gateway.connections import Connection
from gateway.settings import GatewaySettings
from specdec.client import Client
from specdec.security import tls
from specdec.telemetry.process_metrics import ProcessMetrics
from specdec.telemetry.prometheus import Scrape

_SEND_BUFFER = 1 << 17
"""Bytes that the system keeps for a client that reads slowly. By default it would keep MiB for each."""


_LAST_WORDS_S = 1.0
"""Of the grace period: time to tell clients of the end."""


class _Uvicorn(uvicorn.Server):
    """Signals are for the process, which may have other servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """Listens once started. Create it on the serving event loop. Raises OSError if it cannot listen there, and
    ValueError, with the reason in words, if its certificate is none for a gateway."""

    def __init__(self, settings: GatewaySettings, scrape: Scrape) -> None:
        self._settings = settings
        certificates = tls.of(settings, never=("target", "draft"))
        # The orchestrators authenticate callers by their keys, which are passed on.
        ca = tls.Tls(settings.tls_ca) if settings.tls_ca else None
        self._client = Client(*settings.orchestrator, tls=ca)
        self._socket = _listening(settings.host, settings.port, settings.shared_port)
        self._gateway = Gateway(self._client, settings, scrape)
        config = uvicorn.Config(
            self._gateway.app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=settings.idle_connection_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=max(1, math.ceil(settings.shutdown_grace_s)),
            http=Connection,
            limit_concurrency=settings.max_connections,
            ssl_context_factory=(lambda *_: certificates.https_context()) if certificates else None,
        )
        self._server = _Uvicorn(config)
        self._process_metrics = ProcessMetrics("gateway")
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    async def start(self) -> None:
        self._process_metrics.start()
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Accept no more requests, let running ones end within the grace period, end the others with an error, then
        close."""
        self._server.should_exit = True
        grace_s = self._settings.shutdown_grace_s
        left_s = grace_s - min(_LAST_WORDS_S, grace_s / 4)
        end = asyncio.get_running_loop().call_later(left_s, self._gateway.end)
        if self._serving is not None:
            await self._serving
        end.cancel()
        await self._client.__aexit__()
        await self._process_metrics.stop()


def _listening(host: str, port: int, shared: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # connections inherit it
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener

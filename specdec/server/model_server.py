"""One model service as a process: load, listen, serve until SIGTERM, drain, stop.

Knows what the draft and the target service have in common; does not know what either of them computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import uvloop

from specdec.core.rounds import Load, ModelInfo
from specdec.core.settings import EngineSettings, lacks
from specdec.security import tls
from specdec.server import liveness
from specdec.server.process import freeze_garbage, let_threads_sleep
from specdec.server.step_loop import Engine
from specdec.server.streams import Codec, StreamServer
from specdec.telemetry import model_metrics
from specdec.telemetry import setup as telemetry
from specdec.telemetry.process_metrics import ProcessMetrics
from specdec.transport import rpc, wire
from specdec.v1 import common_pb2

log = logging.getLogger(__name__)


_LAST_MESSAGES_S = 0.25
"""Time for the last answers and health updates to be sent before the server ends."""

_LAST_PASS_S = 5.0
"""The longest wait for the current pass after the drain."""


class ModelServicer:
    """The part that both servicers share: the model's description, and streams."""

    def __init__(self, engine: Engine, codec: Codec, info: ModelInfo, name: str) -> None:
        self.info = dataclasses.replace(info, instance=uuid.uuid4().hex)
        self.streams = StreamServer(engine, codec, name)

    async def GetModelInfo(
        self, request: common_pb2.GetModelInfoRequest, context: Any
    ) -> common_pb2.GetModelInfoResponse:
        info = self.info if request.tokens else dataclasses.replace(self.info, tokens=())
        return common_pb2.GetModelInfoResponse(
            model=wire.write_info(info),
            load=wire.write_load(self.streams.load),
            keepalive=rpc.keepalive(),
        )


class ModelServer:
    """A model service. It listens from ``start`` on. Create it on the event loop that serves.

    ``role`` is the DNS name in its certificate; ``stream`` is the method that only orchestrators may call. Raises
    ValueError if the certificate is invalid.
    """

    def __init__(
        self,
        servicer: ModelServicer,
        register: Callable[[Any, Any], None],
        service: str,
        settings: EngineSettings,
        role: str,
        stream: str,
    ) -> None:
        self.servicer = servicer
        self._settings = settings
        callers = {f"/{service}/{stream}": "orchestrator"}
        self._server = rpc.Server(settings, [service], tls=tls.of(settings, role), callers=callers)
        self._watch: asyncio.Task[str] | None = None
        register(servicer, self._server.grpc)
        name = service.rpartition(".")[2].removesuffix("Service").lower()
        streams = servicer.streams
        model_metrics.observe(name, servicer.info, load=lambda: streams.load, busy_s=lambda: streams.busy_s)
        self._process_metrics = ProcessMetrics(name)

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def health_port(self) -> int:
        return self._server.health_port

    @property
    def load(self) -> Load:
        return self.servicer.streams.load

    async def start(self) -> None:
        await self._server.start()
        self._process_metrics.start()
        self._server.set_serving()
        step_loop = self.servicer.streams.step_loop
        self._watch = asyncio.create_task(liveness.watch(step_loop, self._server, self._settings.hung_pass_s))

    async def stuck(self) -> str:
        """Wait until the service must be restarted; returns the reason."""
        assert self._watch is not None, "a service that was not started"
        return await asyncio.shield(self._watch)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain for at most ``grace_s`` (sequences move to other replicas after their current round), then close."""
        if self._watch is not None:
            self._watch.cancel()
        self._server.set_serving(False)
        if grace_s:
            await self.servicer.streams.drain(grace_s)
        # The grace is for watchers of the health service. The orchestrators' streams would not end within any grace.
        await self._server.stop(_LAST_MESSAGES_S if grace_s else 0)
        await self.servicer.streams.stop()
        await self._process_metrics.stop()


def run(settings: EngineSettings, name: str, build: Callable[[], Callable[[], ModelServer]]) -> None:
    """Run the service until it ends. ``build`` loads the model and returns a factory, which makes the server on the
    event loop. Raises SystemExit: 2 for a bad setting, 1 if it cannot listen; exits with RESTART_STATUS if it hangs."""
    try:
        telemetry.set_up(f"specdec-{name}", settings)
        tls.of(settings, name)  # fail before the model is loaded, which takes minutes
        let_threads_sleep()
        with _exit_at_signals():
            make_server = build()
    except (ValueError, ImportError) as error:
        print(f"specdec {name}: {lacks(error) if isinstance(error, ImportError) else error}", file=sys.stderr)
        raise SystemExit(2) from error

    async def main() -> None:
        server = make_server()
        await server.start()
        freeze_garbage()
        info = server.servicer.info
        log.info(
            "serving",
            extra={
                "address": settings.address(server.port),
                "model": info.name,
                "digest": info.model_digest[:12],
                "dtype": info.dtype,
                "backend": info.backend,
            },
        )
        if (reason := await _stuck_before_signalled(server)) is not None:
            log.critical("the service gives itself up and must be restarted", extra={"reason": reason})
            await asyncio.sleep(_LAST_MESSAGES_S)
            # A regular exit would wait for the thread that hangs.
            os._exit(liveness.RESTART_STATUS)
        log.info("draining")
        stopping = asyncio.create_task(server.stop(settings.shutdown_grace_s))
        if not (await asyncio.wait({stopping}, timeout=settings.shutdown_grace_s + _LAST_PASS_S))[0]:
            log.critical("a pass hangs; the service ends without waiting for it")
            os._exit(liveness.RESTART_STATUS)
        await stopping
        log.info("stopped")

    try:
        uvloop.run(main())
    except OSError as error:
        print(f"specdec {name}: {error}", file=sys.stderr)
        raise SystemExit(1) from error


async def _stuck_before_signalled(server: ModelServer) -> str | None:
    signalled, stuck = asyncio.create_task(rpc.signalled()), asyncio.create_task(server.stuck())
    await asyncio.wait({signalled, stuck}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if stuck.done():
        return stuck.result()
    stuck.cancel()
    return None


@contextlib.contextmanager
def _exit_at_signals() -> Iterator[None]:
    """Exit at once at SIGTERM or SIGINT, while nothing is served yet. Process 1 of a container ignores signals that
    have no handler, and a regular exit would wait for the thread that loads the model."""
    before = {number: signal.signal(number, lambda *_: os._exit(0)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

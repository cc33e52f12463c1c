"""One model service as a process: load, listen, serve until SIGTERM, drain, stop.

Knows what the draft and the target service do alike; refuses to know what either of them computes.
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
from specdec.core.settings import EngineSettings
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


_LAST_WORDS_S = 0.25
"""Between the last answer and the end of the server, so that the news of it gets out."""

_LAST_PASS_S = 5.0
"""After the grace the pass at hand is waited for, no longer than this."""


class ModelServicer:
    """What both servicers consist of: the model's description, and streams."""

    def __init__(self, engine: Engine, codec: Codec, info: ModelInfo, name: str) -> None:
        self.info = dataclasses.replace(info, instance=uuid.uuid4().hex)
        self.streams = StreamServer(engine, codec, name)

    async def GetModelInfo(
        self, request: common_pb2.GetModelInfoRequest, context: Any
    ) -> common_pb2.GetModelInfoResponse:
        return common_pb2.GetModelInfoResponse(
            model=wire.write_info(self.info),
            load=wire.write_load(self.streams.load),
            keepalive=rpc.keepalive(),
        )


class ModelServer:
    """A model service that listens once started. Create it on the event loop that serves.

    ``role`` is the name in its certificate, ``stream`` the method that is for orchestrators alone. Raises ValueError if
    the certificate is no good.
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
        model_metrics.observe(name, servicer.info, lambda: servicer.streams.load, lambda: servicer.streams.busy_s)
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
        """Returns, with the reason, once nothing helps the service but to be started again."""
        assert self._watch is not None, "a service that was not started"
        return await asyncio.shield(self._watch)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain within the grace (live sequences are sent elsewhere at their round's end), then close."""
        if self._watch is not None:
            self._watch.cancel()
        self._server.set_serving(False)
        if grace_s:
            await self.servicer.streams.drain(grace_s)
        # The orchestrators' streams never end by themselves; but whoever watches its health is to hear of the end.
        await self._server.stop(_LAST_WORDS_S if grace_s else 0)
        await self.servicer.streams.stop()
        await self._process_metrics.stop()


def run(settings: EngineSettings, name: str, build: Callable[[], Callable[[], ModelServer]]) -> None:
    """The whole process. ``build`` loads the model and returns what makes the server on the event loop."""
    try:
        telemetry.set_up(f"specdec-{name}", settings)
        tls.of(settings, name)  # before minutes of loading a model
        let_threads_sleep()
        with _left_at_signals():
            make_server = build()
    except ValueError as error:
        print(f"specdec {name}: {error}", file=sys.stderr)
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
            log.critical("the service gives itself up, to be started again", extra={"reason": reason})
            await asyncio.sleep(_LAST_WORDS_S)
            # Any other way out waits for the thread that hangs.
            os._exit(liveness.RESTART_STATUS)
        log.info("draining")
        stopping = asyncio.create_task(server.stop(settings.shutdown_grace_s))
        if not (await asyncio.wait({stopping}, timeout=settings.shutdown_grace_s + _LAST_PASS_S))[0]:
            log.critical("a pass hangs; the service ends without it")
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
def _left_at_signals() -> Iterator[None]:
    """Process 1 of a container ignores a signal that nothing handles, and would go on loading until it is killed.

    Nothing is served yet, so nothing is lost. Any other way out waits for the thread that loads the model.
    """
    before = {number: signal.signal(number, lambda *_: os._exit(0)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

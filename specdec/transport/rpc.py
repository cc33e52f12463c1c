"""How our gRPC servers and channels are made: options, TLS, health, reflection, errors, trace context, shutdown.

Client and server keepalive live here side by side because they must agree. Knows nothing of models or sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from specdec.core.errors import InvalidArgument, PermissionDenied, SpecdecError, from_status, to_status
from specdec.core.settings import ServiceSettings
from specdec.security.tls import Tls
from specdec.transport import health
from specdec.v1 import common_pb2

log = logging.getLogger(__name__)

KEEPALIVE_MS = 2_000
PING_TIMEOUT_MS = 1_000
MIN_PING_INTERVAL_MS = KEEPALIVE_MS // 2
PUBLIC_KEEPALIVE_MS = 5_000
PUBLIC_PING_TIMEOUT_MS = 5_000
"""Between clients and orchestrators: over the internet a second without an answer says nothing, and a client may answer
pings in the thread that is busy with what came."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

_COMMON: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # The timeout that decides how fast a frozen peer is seen; 60 s by default whatever keepalive says.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS = [
    *_COMMON,
    # This spelling is the one that is read; without it the server answers our pings with "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS = [
    *_COMMON,
    # A replica that comes back is found within a second, not after a minute's backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Not a backoff but how long one attempt may take: round trips, TLS, and a peer that is busy.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # Two channels to one address must not share a connection: its death would take both.
    ("grpc.use_local_subchannel_pool", 1),
]

_PUBLIC = {
    "grpc.keepalive_time_ms": PUBLIC_KEEPALIVE_MS,
    "grpc.keepalive_timeout_ms": PUBLIC_PING_TIMEOUT_MS,
    "grpc.http2.ping_timeout_ms": PUBLIC_PING_TIMEOUT_MS,
}
"""What differs there; how often a client may ping does not, because there are clients that ping as inside."""

LIVENESS = "liveness"
"""The health service that says whether to start the process again; the others say whether to send it work."""

request_metadata: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("request_metadata")
"""The text metadata of the call being served, for trace context and request ids."""


def channel(address: str, tls: Tls | None = None, name: str = "", public: bool = False) -> grpc.aio.Channel:
    """A channel to ``host:port``; in the clear without ``tls``.

    With it, the certificate there must have ``name``: endpoints are known by role, not by host. Without a name it must
    have the host. The files of ``tls`` are read now. ``public``: the way there may be long and slow.
    """
    options = _patient(CHANNEL_OPTIONS) if public else CHANNEL_OPTIONS
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [("grpc.ssl_target_name_override", name)] if name else []
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=[*options, *named])


def _patient(options: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, _PUBLIC.get(name, value)) for name, value in options]


def bearer(api_key: str) -> tuple[tuple[str, str], ...]:
    """The metadata that shows an API key; none without one."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def aging(max_age_s: float) -> list[tuple[str, Any]]:
    """Server options by which a connection is told to go after about so long, and its calls may end; 0: never.

    The caller's next request comes by a new connection, which a balancer may send to another server.
    """
    return [("grpc.max_connection_age_ms", int(max_age_s * 1e3))] if max_age_s else []


def keepalive() -> common_pb2.Keepalive:
    """What a server tells of its settings: how it pings other services, and how often it may be pinged."""
    return common_pb2.Keepalive(keepalive_ms=KEEPALIVE_MS, min_ping_interval_ms=MIN_PING_INTERVAL_MS)


def error_of(error: grpc.aio.AioRpcError) -> SpecdecError:
    """The error that a failed call stands for, as the server meant it.

    Where its details contradict its code or message, or are no status at all, code and message alone count.
    """
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):
        status = None
    if status is None:
        status = status_pb2.Status(code=error.code().value[0], message=error.details() or "")
    return from_status(status)


class _Interceptor(grpc.aio.ServerInterceptor):
    """Turns SpecdecError into its status, so that no servicer holds a try/except; and turns away who may not call."""

    def __init__(self, callers: Mapping[str, str]) -> None:
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        read, write = _reads(handler.request_deserializer), handler.response_serializer
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_guarded(handler.unary_unary), read, write)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_guarded_stream(handler.unary_stream), read, write)
        if handler.stream_stream:
            caller = self._callers.get(handler_call_details.method, "")
            return grpc.stream_stream_rpc_method_handler(_guarded_stream(handler.stream_stream, caller), read, write)
        return handler


class _Unreadable:
    """What stands in for a request that is no message of its type: gRPC itself would answer INTERNAL."""


def _reads(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Unreadable()

    return read


def _checked(request: Any) -> Any:
    if isinstance(request, _Unreadable):
        raise InvalidArgument([("request", "these bytes are no message of this method")])
    return request


class _Requests:
    """The requests of a call, checked. A class, and not a generator around gRPC's own: those cost a hop each."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        request = await self._context.read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        return _checked(request)


def _guarded(behavior: Any) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        _remember(context)
        try:
            return await behavior(_checked(request), context)
        except SpecdecError as error:
            await context.abort_with_status(rpc_status.to_status(to_status(error)))

    return call


def _guarded_stream(behavior: Any, caller: str = "") -> Any:
    # Writes by itself: gRPC drops the generator of a cancelled call without closing it, and a dropped generator
    # runs its finally whenever the collector comes.
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        _remember(context)
        try:
            _check_caller(context, caller)
            request = _Requests(context) if hasattr(request, "__aiter__") else _checked(request)
            responses = behavior(request, context)
            if inspect.isawaitable(responses):  # such as the health service's Watch
                await responses
                return
            async with contextlib.aclosing(responses):
                async for response in responses:
                    await context.write(response)
        except SpecdecError as error:
            # The caller may be gone by now.
            with contextlib.suppress(grpc.aio.InternalError):
                await context.abort_with_status(rpc_status.to_status(to_status(error)))

    return call


def _remember(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    pairs = context.invocation_metadata() or ()
    request_metadata.set({key: value for key, value in pairs if isinstance(value, str)})


def _check_caller(context: grpc.aio.ServicerContext[Any, Any], name: str) -> None:
    """The certificate of whoever calls must have this DNS name; any will do without."""
    names = [each.decode() for each in context.auth_context().get("peer_dns") or ()] if name else []
    if name and name not in names:
        raise PermissionDenied(
            f"this call is for {name} alone, and the caller's certificate is made out to {', '.join(names) or 'nobody'}"
        )


class Server:
    """A gRPC server that listens but is not yet serving: health says so until ``set_serving``.

    With ``tls``, nobody connects without a certificate of our CA if ``callers`` are given: methods with streams of
    requests, and the name that a certificate must have to call them. The other methods are for all of the CA's.
    ``public``: callers may be far away.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        services: Iterable[str],
        options: Iterable[tuple[str, Any]] = (),
        *,
        tls: Tls | None = None,
        callers: Mapping[str, str] | None = None,
        public: bool = False,
    ) -> None:
        self._services = ["", *services]
        self._settings = settings
        self._credentials = tls.server_credentials(ask_callers=bool(callers)) if tls else None
        interceptor = _Interceptor(callers or {} if tls else {})
        own = _patient(SERVER_OPTIONS) if public else SERVER_OPTIONS
        self.grpc = grpc.aio.server(interceptors=[interceptor], options=[*own, *options])
        self._health = health.Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if settings.reflection:
            names = [*services, health.SERVICE, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self.grpc)
        self.port = 0
        self.health_port = 0
        self._health_alone: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if an address cannot be had."""
        self.port = self._listen(self.grpc, self._settings.port, self._credentials)
        if self._settings.health_port is not None:
            # A kubelet's probes cannot speak TLS.
            self._health_alone = grpc.aio.server(options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_alone)
            self.health_port = self._listen(self._health_alone, self._settings.health_port)
        self.set_serving(False)
        self.set_alive(True)
        await self.grpc.start()
        if self._health_alone is not None:
            await self._health_alone.start()

    def _listen(self, server: grpc.aio.Server, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
        address = self._settings.address(port)
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error

    def set_serving(self, serving: bool = True) -> None:
        for service in self._services:
            self._health.tell(service, serving)

    def set_alive(self, alive: bool) -> None:
        self._health.tell(LIVENESS, alive)

    async def stop(self, grace_s: float = 0.0) -> None:
        self.set_serving(False)
        try:
            await self.grpc.stop(grace_s)
        finally:
            if self._health_alone is not None:
                await self._health_alone.stop(0)


async def signalled() -> None:
    """Returns at SIGTERM or SIGINT."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    try:
        await event.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

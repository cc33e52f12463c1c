"""gRPC servers and channels: options, TLS, health, reflection, errors, trace context, shutdown.

The keepalive settings of client and server are both here because they must agree. Knows nothing of models or sequences.
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
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from specdec.core.environment import proxy_options
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
"""Keepalive between clients and orchestrators. Over the internet a second without an answer is normal, and a client may
answer pings in the thread that processes its responses."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_ANSWER_BYTES = 2 * 1024 * 1024
"""Limit of a message from a model service, which sends 1 MiB or a single entry (specdec.transport.framing). Parsing
blocks the event loop: 33 ms per MiB of the smallest entries."""

_COMMON: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # This timeout decides how fast a frozen peer is detected. Its default is 60 s, regardless of keepalive_timeout_ms.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
SERVER_OPTIONS = [
    *_COMMON,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # gRPC reads only this spelling. Without the option the server answers our pings with "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS = [
    *_COMMON,
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # To find a replica that comes back within a second. The default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name, the timeout of one attempt: it has to cover round trips, TLS and a busy peer.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # Two channels to one address must not share a connection: its loss would affect both.
    ("grpc.use_local_subchannel_pool", 1),
]

_PUBLIC = {
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.keepalive_time_ms": PUBLIC_KEEPALIVE_MS,
    "grpc.keepalive_timeout_ms": PUBLIC_PING_TIMEOUT_MS,
    "grpc.http2.ping_timeout_ms": PUBLIC_PING_TIMEOUT_MS,
}
"""Options for clients of an orchestrator. The ping limit is not among them: some clients ping as often as services."""

LIVENESS = "liveness"
"""The health service that tells whether the process must be restarted; the others tell whether to send it work."""

INSTANCE = "specdec-instance"
"""The initial metadata of Generate: GetServerInfoResponse.instance of the process that has the request."""

request_metadata: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("request_metadata")
"""The text metadata of the current call, for trace context and request ids."""


def channel(
    address: str, tls: Tls | None = None, name: str = "", public: bool = False, web_proxies: bool = False
) -> grpc.aio.Channel:
    """A channel to ``host:port``; unencrypted without ``tls``.

    With ``tls`` the server's certificate must have the DNS name ``name``, a role, or the host if ``name`` is empty. The
    files of ``tls`` are read now. ``public``: the connection may cross the internet, so keepalive is less strict.
    ``web_proxies``: use the proxies of the environment as other gRPC clients do.
    """
    options = [*(_public_options(CHANNEL_OPTIONS) if public else CHANNEL_OPTIONS)]
    options += [] if web_proxies else proxy_options()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [("grpc.ssl_target_name_override", name)] if name else []
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=[*options, *named])


def _public_options(options: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, _PUBLIC.get(name, value)) for name, value in options]


def bearer(api_key: str) -> tuple[tuple[str, str], ...]:
    """The call metadata with an API key; empty without a key."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def aging(max_age_s: float) -> list[tuple[str, Any]]:
    """Server options that end a connection after about ``max_age_s``, without ending its calls; none if that is 0.

    The caller's next request uses a new connection, which a load balancer may route to another server.
    """
    return [("grpc.max_connection_age_ms", int(max_age_s * 1e3))] if max_age_s else []


def keepalive() -> common_pb2.Keepalive:
    """The keepalive settings that a server reports: how it pings other services, and how often it may be pinged."""
    return common_pb2.Keepalive(keepalive_ms=KEEPALIVE_MS, min_ping_interval_ms=MIN_PING_INTERVAL_MS)


def error_of(error: grpc.aio.AioRpcError) -> SpecdecError:
    """The error of a failed call, from its code and message alone if its details are invalid or contradict them."""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):
        status = None
    if status is None:
        status = status_pb2.Status(code=error.code().value[0], message=error.details() or "")
    return from_status(status)


class _Interceptor(grpc.aio.ServerInterceptor):
    """Turns errors into statuses, so that no servicer needs a try/except. Refuses callers without access."""

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
    """Replaces a request that cannot be parsed, for which gRPC itself would return INTERNAL."""


def _reads(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Unreadable()

    return read


def _checked(request: Any) -> Any:
    if isinstance(request, _Unreadable):
        raise InvalidArgument([("request", "not a valid message of this method's request type")])
    return request


class _Requests:
    """The checked requests of a call. A class, because a generator around gRPC's iterator costs more per request."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            request = await self._context.read()
        except grpc.aio.BaseError:  # the caller has gone
            raise StopAsyncIteration from None
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        return _checked(request)


@contextlib.asynccontextmanager
async def _statuses(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Errors of a servicer as statuses. One outside of the tree is a bug: its text is for the log alone."""
    try:
        yield
        return
    except SpecdecError as error:
        status = to_status(error)
    except (grpc.aio.BaseError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic in Rust is not an Exception
        log.exception("a call failed")
        status = status_pb2.Status(code=code_pb2.INTERNAL, message="this service has failed; its log says more")
    with contextlib.suppress(grpc.aio.InternalError):  # the caller may have disconnected
        await context.abort_with_status(rpc_status.to_status(status))


def _guarded(behavior: Any) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        _remember(context)
        async with _statuses(context):
            return await behavior(_checked(request), context)

    return call


def _guarded_stream(behavior: Any, caller: str = "") -> Any:
    # Writes the responses instead of yielding them: gRPC drops the generator of a cancelled call without closing it, so
    # its finally block would run only at garbage collection.
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        _remember(context)
        async with _statuses(context):
            _check_caller(context, caller)
            request = _Requests(context) if hasattr(request, "__aiter__") else _checked(request)
            responses = behavior(request, context)
            if inspect.isawaitable(responses):  # such as the health service's Watch
                await responses
                return
            async with contextlib.aclosing(responses):
                async for response in responses:
                    await context.write(response)

    return call


def _remember(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    pairs = context.invocation_metadata() or ()
    request_metadata.set({key: value for key, value in pairs if isinstance(value, str)})


def _check_caller(context: grpc.aio.ServicerContext[Any, Any], name: str) -> None:
    """Raise PermissionDenied unless the caller's certificate has the DNS name ``name``. An empty name allows all."""
    if not name:
        return
    names = [peer.decode() for peer in context.auth_context().get("peer_dns") or ()]
    if name not in names:
        owner = ", ".join(names) or "no DNS name"
        raise PermissionDenied(f"this call is for {name} alone, and the caller's certificate is issued for {owner}")


class Server:
    """A gRPC server. Its health service reports NOT_SERVING until ``set_serving``.

    ``callers`` maps methods with request streams to the DNS name that a caller's certificate must have. With ``tls``
    and ``callers``, every caller needs a certificate of our CA; the other methods accept any of its certificates.
    ``public``: callers may connect over the internet. ``shared_port``: other processes may listen on the ports.
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
        shared_port: bool = False,
    ) -> None:
        self._services = ["", *services]
        self._settings = settings
        self._credentials = tls.server_credentials(ask_callers=bool(callers)) if tls else None
        interceptor = _Interceptor(callers or {} if tls else {})
        defaults = _public_options(SERVER_OPTIONS) if public else SERVER_OPTIONS
        # Of two options with one name gRPC takes the first.
        self._sharing = [("grpc.so_reuseport", int(shared_port))]
        self.grpc = grpc.aio.server(interceptors=[interceptor], options=[*self._sharing, *options, *defaults])
        self._health = health.Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if settings.reflection:
            names = [*services, health.SERVICE, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self.grpc)
        self.port = 0
        self.health_port = 0
        self._health_alone: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Begin to listen. Raises OSError if that fails for an address."""
        self.port = self._listen(self.grpc, self._settings.port, self._credentials)
        if self._settings.health_port is not None:
            # On a port without TLS, because a kubelet's probes do not support it.
            self._health_alone = grpc.aio.server(options=[*self._sharing, *SERVER_OPTIONS])
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
    """Wait for SIGTERM or SIGINT."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    try:
        await event.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

"""A connection that waits for a request for a limited time, and makes room for another one. Knows uvicorn and h11."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.errors import HttpError, encoded, unavailable

_HEADERS_S = 10.0
"""Time for the headers of a request to arrive."""


class Connection(H11Protocol):
    """One of at most ``limit_concurrency``. Beyond it the answer is 503, if none can make room."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._application = self.app
        self._waiting_since = self.loop.time()
        self._watch()
        limit = self.config.limit_concurrency
        if limit is not None and len(self.connections) >= limit:
            # Callers that have sent no request yet need no key to stay, and health checks must get in.
            waiting = [other for other in self.connections if isinstance(other, Connection) and other.waits]
            oldest = min(waiting, key=lambda other: other._waiting_since)
            if oldest is not self:
                oldest.make_room()

    @property
    def waits(self) -> bool:
        """Whether it waits for a request, or for the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def make_room(self) -> None:
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        limit = self.config.limit_concurrency
        self.app = self._application
        if limit is not None and max(len(self.connections), len(self.tasks)) >= limit:
            self.app = unavailable("too many connections at a time", connection="close").response()
        self.limit_concurrency = None  # what uvicorn answers is no JSON
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waiting_since = self.loop.time()

    def _watch(self) -> None:
        """Time passes until the headers are there. The application bounds the time of a body."""
        between = self.cycle is None or self.cycle.response_complete
        if not between and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif between and self._deadline is None:
            self._deadline = self.loop.call_later(_HEADERS_S, self._late)

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the request did not arrive within {_HEADERS_S:g} s")
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        error = sys.exc_info()[1]  # of h11; uvicorn does not pass it on
        status = getattr(error, "error_status_hint", 400)
        self._refuse(status, "the headers are too large" if status == 431 else "this is no HTTP request")
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        data = encoded(HttpError(status, message).body)
        length = str(len(data)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
        with suppress(h11.LocalProtocolError):  # an answer has begun
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=data), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

"""The names under which a gateway on loopback is called. Knows the header host; does not know requests."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import HttpError

_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)


class OfThisMachine:
    """Refuses requests to other names than this machine's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = _LOOPBACK.fullmatch(Headers(scope=scope).get("host", ""))
        refused = HttpError(400, "the header host does not name this machine").response()
        await (self._app if known else refused)(scope, receive, send)

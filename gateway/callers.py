"""What the headers of a request say of its caller: what the orchestrators get of it, which pages may call,
and under which names.

Does not know bodies.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import HttpError
from specdec.client import Metadata

MAX_REQUEST_ID = 128
_MAX_KEY_BYTES = 4096
"""The metadata of a call may have 8 KiB."""
_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def request_id(request: Request) -> str:
    """The client's, or a fresh one."""
    given = request.headers.get("x-request-id", "")[:MAX_REQUEST_ID]
    return given if given.isascii() and given.isprintable() and given else uuid.uuid4().hex


def metadata_of(request: Request) -> Metadata:
    """What the orchestrators get of the caller: key, request id, trace. Raises HttpError for a key that is none."""
    metadata = [("x-request-id", request.state.request_id)]
    key = request.headers.get("authorization", "")
    if len(key) > _MAX_KEY_BYTES:
        raise HttpError(431, f"authorization: at most {_MAX_KEY_BYTES} bytes, not {len(key)}")
    if key and key.isascii() and key.isprintable():
        metadata.append(("authorization", key))
    if _TRACEPARENT.fullmatch(trace := request.headers.get("traceparent", "")):
        metadata.append(("traceparent", trace))
    return metadata


def check_page(request: Request, allowed_origins: Collection[str]) -> None:
    """Raises HttpError if a web page calls that is neither allowed nor from here.

    A browser names the page with every call that can do something. Pages from elsewhere may send a body without asking
    first (as text/plain), and a page under a name that was made to lead to this machine is taken for one from here. So
    a page without TLS counts as from here only under a name that none can register.
    """
    origin = request.headers.get("origin")
    if origin is None or origin in allowed_origins or "*" in allowed_origins:
        return
    if request.headers.get("sec-fetch-site") == "same-origin":  # sent of pages with TLS or of this machine alone
        return
    if not _is_from(origin, request.headers.get("host", "")):
        raise HttpError(403, f"the page {origin[:256]} may not call this API; allowed_origins names those that may")


def _is_from(origin: str, host: str) -> bool:
    try:
        page = urlsplit(origin)
        return page.netloc == host and (page.scheme == "https" or _is_local(page.hostname or ""))
    except ValueError:
        return False


def _is_local(host: str) -> bool:
    """Whether ``host`` is an address, or a name that is not of the public DNS."""
    try:
        ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".localhost", ".local", ".internal"))
    return True


class ThisMachineOnly:
    """Refuses requests to other names than this machine's and those that are allowed. Browsers always send a name."""

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str]) -> None:
        self._app = app
        self._allowed = {host.lower() for host in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host")
        names = {"*", re.sub(r":\d+$", "", host.lower())} if host else {"*"}
        is_allowed = host is None or _LOOPBACK.fullmatch(host) or names & self._allowed
        message = f"{(host or '')[:256]!r} is not a name of this machine; --allowed-hosts says which others are"
        await (self._app if is_allowed else HttpError(400, message).response())(scope, receive, send)


class Pages(CORSMiddleware):
    """Answers what browsers ask on behalf of pages."""

    def __init__(self, app: ASGIApp, allowed_origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network="*" not in allowed_origins,  # not to every page of the web
            expose_headers=["x-request-id"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        message = f"{bytes(response.body).decode()}; --allowed-origins says which pages may call"
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return HttpError(response.status_code, message, headers=headers).response()


class UnderPath:
    """Takes paths with the prefix under which a proxy serves this, and without it: proxies keep it or strip it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not f"{path}/".startswith(f"{self._root_path}/"):
            path = self._root_path + path
        await self._app({**scope, "root_path": self._root_path, "path": path}, receive, send)

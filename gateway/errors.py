"""Errors -> HTTP: status, headers, and a body in OpenAI's shape; and JSON that every client can read.

Knows the error tree; does not know requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from specdec.core.errors import (
    ContextExceeded,
    DeadlineExceeded,
    GivenUp,
    InvalidArgument,
    ModelMismatch,
    Overloaded,
    PermissionDenied,
    ReplicaLost,
    SpecdecError,
    TooLarge,
    Unauthenticated,
)

_INVALID, _LIMITED, _SERVER_ERROR = "invalid_request_error", "rate_limit_error", "server_error"
_NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients repeat a request after a status of 500 or above, unless they find this header."""


def encoded(value: Any) -> bytes:
    """As JSON. What UTF-8 has no bytes for, half a surrogate pair, becomes "?"."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encoded(content)


class HttpError(Exception):
    """An answer that is not 200. ``param``: the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = _INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Json:
        return Json(self.body, self.status, self.headers)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1e3))}


def unavailable(message: str, **headers: str) -> HttpError:
    """A new one for each request: an error that is raised keeps the request in its traceback."""
    return HttpError(503, message, _SERVER_ERROR, headers=_retry_after(1.0) | headers)


def unknown_model(name: str, served: Sequence[str]) -> HttpError:
    message = f"The model `{name[:256]}` does not exist. Served here: {', '.join(served)}"
    return HttpError(404, message, code="model_not_found", param="model")


_ANSWERS: tuple[tuple[type[SpecdecError], int, str, str | None, Mapping[str, str]], ...] = (
    (InvalidArgument, 400, _INVALID, None, {}),
    (ContextExceeded, 400, _INVALID, "context_length_exceeded", {}),
    (TooLarge, 413, _INVALID, None, {}),
    (Unauthenticated, 401, _INVALID, "invalid_api_key", {"www-authenticate": "Bearer"}),
    (PermissionDenied, 403, _INVALID, "permission_denied", {}),
    (Overloaded, 429, _LIMITED, "rate_limit_exceeded", {}),
    (DeadlineExceeded, 504, _SERVER_ERROR, "timeout", _NO_RETRY),  # another try would cost as much and end as this one
    (GivenUp, 503, _SERVER_ERROR, None, _NO_RETRY),  # another try would cost more replicas
    (SpecdecError, 503, _SERVER_ERROR, None, _retry_after(1.0)),
)
"""Status, type, code and headers. The first class that fits counts."""

_FOR_CALLERS: tuple[tuple[type[SpecdecError], str], ...] = (
    (ReplicaLost, "the connection to the orchestrator is lost"),
    (ModelMismatch, "the model was replaced while the request ran"),
    (DeadlineExceeded, "the request took longer than it may"),
)
"""In place of messages that have addresses in them."""
HIDDEN = tuple(kind for kind, _ in _FOR_CALLERS)


def http_error(error: Exception) -> HttpError:
    """The answer to a request that failed with ``error``."""
    if isinstance(error, HttpError):
        return error
    for kind_of_error, status, kind, code, headers in _ANSWERS:
        if isinstance(error, kind_of_error):
            violations = error.violations if isinstance(error, InvalidArgument) else ()
            if isinstance(error, Overloaded):
                headers = _retry_after(error.retry_after_s)
            param = violations[0][0] if violations else None
            message = next((words for hidden, words in _FOR_CALLERS if isinstance(error, hidden)), str(error))
            return HttpError(status, message, kind, code=code, param=param, headers=headers)
    return HttpError(500, "the gateway has failed; its log says more", _SERVER_ERROR)

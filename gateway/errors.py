"""Errors -> HTTP: status, headers, and a body in OpenAI's shape. Knows the error tree; does not know requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from specdec.core.errors import (
    ContextExceeded,
    DeadlineExceeded,
    GivenUp,
    InvalidArgument,
    ModelMismatch,
    NoReplica,
    Overloaded,
    PermissionDenied,
    ReplicaLost,
    SpecdecError,
    TooLarge,
    Unauthenticated,
)

_RETRY_AFTER_S = 1.0
_NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients repeat a request after a status of 500 or above, unless they find this header."""


class HttpError(Exception):
    """An answer that is not 200. ``param``: the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def http_error(error: Exception) -> HttpError:
    """The answer to a request that failed with ``error``."""
    if isinstance(error, HttpError):
        return error
    message = str(error)
    if isinstance(error, InvalidArgument):
        return HttpError(400, message, param=error.violations[0][0] if error.violations else None)
    if isinstance(error, ContextExceeded):
        return HttpError(400, message, code="context_length_exceeded")
    if isinstance(error, TooLarge):
        return HttpError(413, message)
    if isinstance(error, Unauthenticated):
        return HttpError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    if isinstance(error, PermissionDenied):
        return HttpError(403, message, code="permission_denied")
    if isinstance(error, Overloaded):
        return HttpError(
            429, message, "rate_limit_error", "rate_limit_exceeded", headers=_retry_after(error.retry_after_s)
        )
    if isinstance(error, DeadlineExceeded):
        # Another try would cost as much and end in the same way.
        return HttpError(504, message, "server_error", "timeout", headers=_NO_RETRY)
    if isinstance(error, GivenUp):
        # Another try would cost more replicas.
        return HttpError(503, message, "server_error", headers=_NO_RETRY)
    if isinstance(error, (NoReplica, ReplicaLost, ModelMismatch)):
        return HttpError(503, message, "server_error", headers=_retry_after(_RETRY_AFTER_S))
    if isinstance(error, SpecdecError):
        return HttpError(503, message, "server_error", headers=_retry_after(_RETRY_AFTER_S))
    return HttpError(500, "the gateway has failed; its log says more", "server_error")


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1e3))}

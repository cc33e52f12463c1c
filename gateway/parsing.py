"""The bytes of a request -> its body, or an HTTP error that names the field. Does not know what fields mean."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from gateway.errors import HttpError

MAX_BODY_BYTES = 1 << 22
_LARGE_BODY_BYTES = 1 << 17
"""A larger body is parsed by a thread: this one takes a millisecond or two."""

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, kind: type[Body], accept_unknown: bool) -> Body:
    """Raises HttpError if the body is none of this kind."""
    data = await _bytes(request)
    if len(data) > _LARGE_BODY_BYTES:
        return await asyncio.to_thread(_parsed, data, kind, accept_unknown)
    return _parsed(data, kind, accept_unknown)


def _parsed(data: bytes, kind: type[Body], accept_unknown: bool) -> Body:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise HttpError(400, "the body is not a JSON object")
    unsupported: dict[str, str] = getattr(kind, "UNSUPPORTED", {})
    for name in value.keys() & unsupported.keys():
        if value[name] is not None:
            raise HttpError(400, f"{name}: not supported; {unsupported[name]}", param=name)
    known = {name: each for name, each in value.items() if name in kind.model_fields}
    rest = {} if accept_unknown else {name: each for name, each in value.items() if name not in unsupported}
    try:
        return kind.model_validate(rest | known)
    except ValidationError as error:
        problems = [(_path(each, value), each["msg"]) for each in error.errors(include_url=False)]
        message = "; ".join(f"{path}: {what}" for path, what in problems[:8])
        # Of the branches of a union, the one that fits best fails at the deepest place.
        raise HttpError(400, message, param=max((path for path, _ in problems), key=len)) from error
    except RecursionError as error:
        raise HttpError(400, "the body is nested too deeply") from error


def _path(error: ErrorDetails, value: Any) -> str:
    """Such as messages[1].content. What pydantic names a branch of a union by is no place in ``value``."""
    found = ""
    for place in error["loc"]:
        if isinstance(place, int):
            found, value = f"{found}[{place}]", value[place]
        elif isinstance(value, dict) and (place in value or error["type"] == "missing"):
            found, value = f"{found}.{place}" if found else place, value.get(place)
    return found or "body"


async def _bytes(request: Request) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise HttpError(413, f"a body has at most {MAX_BODY_BYTES} bytes")
    return bytes(data)

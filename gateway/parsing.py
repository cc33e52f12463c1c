"""JSON -> the body of a request, or an HTTP error that names the field. Does not know what fields mean.

The interpreter's lock is held by each call of a parser or a validator to its end, in a thread, too. So what a caller
can make such a call do is bounded before: the objects and lists of a body, and the problems of a list or an object.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from gateway.errors import HttpError

MAX_NESTED = 1 << 15
"""Objects and lists of a body: an empty one takes three bytes there and some hundred in memory."""

Body = TypeVar("Body", bound=BaseModel)


def parsed(data: bytes, kind: type[Body], accept_unknown: bool) -> Body:
    """Raises HttpError if the body is none of this kind."""
    if (nested := _num_nested(data)) > MAX_NESTED:
        raise HttpError(413, f"a body has at most {MAX_NESTED} objects and lists, not {nested}")
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body cannot be read as JSON: {error}") from error
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


def _num_nested(data: bytes) -> int:
    """The objects and lists of a body, as far as it is JSON."""
    if data.count(b"{") + data.count(b"[") <= MAX_NESTED:
        return 0
    # Texts may have any number of brackets: what is between quotes is left out.
    parts = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    return sum(part.count(b"{") + part.count(b"[") for part in parts[::2])


def _path(error: ErrorDetails, value: Any) -> str:
    """Such as messages[1].content. What pydantic names a branch of a union by is no place in ``value``."""
    found = ""
    for place in error["loc"]:
        if isinstance(place, int):
            found, value = f"{found}[{place}]", value[place]
        elif isinstance(value, dict) and (place in value or error["type"] == "missing"):
            found, value = f"{found}.{place}" if found else place, value.get(place)
    return found or "body"

"""JSON -> the body of a request, or an HTTP error that names the field. Unknown fields are refused, and no value is
taken for one of another type. Does not know what fields mean.

The interpreter's lock is held by each call of a parser or a validator to its end, in a thread, too. So what a caller
can make such a call do is bounded before: the objects and lists of a body, and the problems of a list or an object.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from gateway.errors import HttpError

MAX_NESTED = 1 << 15
"""Objects and lists of a body: an empty one takes three bytes there and some hundred in memory."""

_MAX_UNKNOWN = 8
_MAX_PROBLEMS = 8

T = TypeVar("T")
Few = Annotated[list[T], Field(max_length=1024, fail_fast=True)]
"""The first problem is reported: a list may have a million."""


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    UNSUPPORTED: ClassVar[dict[str, str]] = {}
    """Fields that other servers know, and what to do instead."""

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, value: Any) -> Any:
        """Pydantic would report each unknown field."""
        if isinstance(value, dict) and len(value) > (max_fields := len(cls.model_fields) + _MAX_UNKNOWN):
            raise ValueError(f"has {len(value)} fields, more than {max_fields}")
        return value


Body = TypeVar("Body", bound=StrictBody)


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
    for name in value.keys() & kind.UNSUPPORTED.keys():
        if value[name] is not None:
            raise HttpError(400, f"{name}: not supported; {kind.UNSUPPORTED[name]}", param=name)
    ignored = value.keys() if accept_unknown else kind.UNSUPPORTED.keys()
    fields = {name: field for name, field in value.items() if name in kind.model_fields or name not in ignored}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problems = [(_path(problem, value), problem["msg"]) for problem in error.errors(include_url=False)]
        message = "; ".join(f"{path}: {what}" for path, what in problems[:_MAX_PROBLEMS])
        # Of the branches of a union, the one that fits best fails at the deepest place.
        raise HttpError(400, message, param=max((path for path, _ in problems), key=len)) from error


def _num_nested(data: bytes) -> int:
    """The objects and lists of a body, as far as it is JSON."""
    if data.count(b"{") + data.count(b"[") <= MAX_NESTED:
        return 0
    # Texts may have any number of brackets: what is between quotes is left out.
    parts = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    return sum(part.count(b"{") + part.count(b"[") for part in parts[::2])


def _path(problem: ErrorDetails, value: Any) -> str:
    """Such as messages[1].content. What pydantic names a branch of a union by is no part of ``value``."""
    path = ""
    for key in problem["loc"]:
        if isinstance(key, int):
            path, value = f"{path}[{key}]", value[key]
        elif isinstance(value, dict) and (key in value or problem["type"] == "missing"):
            path, value = f"{path}.{key}" if path else key, value.get(key)
    return path or "body"

"""JSON -> the body of a request, or an HTTP error that names the field. Unknown fields are refused, and no value is
taken for one of another type. Does not know what fields mean.

The interpreter's lock is held by each call of a parser or a validator to its end, in a thread, too. So what a caller
can make such a call do is bounded before: the objects and lists of a body, and the problems of a list or an object.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, from_json

from gateway.errors import HttpError

MAX_NESTED = 1 << 15
"""Objects and lists of a body: an empty one takes three bytes there and some hundred in memory."""

_MAX_UNKNOWN = 8
_MAX_PROBLEMS = 8

T = TypeVar("T")
Few = Annotated[list[T], Field(max_length=1024, fail_fast=True)]
"""The first problem is reported: a list may have a million."""


EMPTY: tuple[Any, ...] = (None, "", [], {})
"""What asks for nothing, in any field."""


class StrictBody(BaseModel):
    """Unknown fields are refused, unless the gateway ignores them: then in all that is nested, too."""

    model_config = ConfigDict(extra="forbid", strict=True)

    UNSUPPORTED: ClassVar[dict[str, str]] = {}
    """Fields that other servers know, and what to do instead."""

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, value: Any, info: ValidationInfo) -> Any:
        """The fields that ask for something. A whole number may be written as 6.0."""
        if not isinstance(value, dict):
            return value
        known = _names(cls)
        ignores = bool(info.context) or cls.model_config.get("extra") == "ignore"
        fields = {
            name: int(field) if isinstance(field, float) and field.is_integer() else field
            for name, field in value.items()
            if (field is not None if name in known else not (ignores or name in cls.UNSUPPORTED or field in EMPTY))
        }
        # Pydantic would report each unknown field.
        if len(fields) > (max_fields := len(known) + _MAX_UNKNOWN):
            raise ValueError(f"has {len(fields)} fields, more than {max_fields}")
        return fields

    @classmethod
    def asks(cls, name: str, fields: dict[str, Any]) -> bool:
        """Whether one of ``fields`` that is not supported asks for anything."""
        return fields[name] not in (None, "", [])  # {} is a schema


@cache
def _names(kind: type[BaseModel]) -> frozenset[str]:
    """The fields of a kind of body, as JSON names them."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class HistoryBody(StrictBody):
    """A part of a conversation. Clients send back what they got here or elsewhere, with fields that change nothing."""

    model_config = ConfigDict(extra="ignore", strict=True)


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
        if kind.asks(name, value):
            raise HttpError(400, f"{name}: not supported; {kind.UNSUPPORTED[name]}", param=name)
    try:
        return kind.model_validate(value, context=accept_unknown)
    except ValidationError as error:
        problems = [
            (_path(problem, value), problem["msg"].removeprefix("Value error, "))
            for problem in error.errors(include_url=False)
        ]
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
            path, value = f"{path}[{key}]", value[key] if isinstance(value, list) and key < len(value) else None
        elif isinstance(value, dict) and (key in value or problem["type"] == "missing"):
            path, value = f"{path}.{key}" if path else key, value.get(key)
    return path or "body"

"""What all bodies have in common: unknown fields are refused, and no value is taken for one of another type.

What is wrong with a body is told in a few problems, however many there are (see gateway.parsing).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

T = TypeVar("T")

_FEW_UNKNOWN = 8

Few = Annotated[list[T], Field(max_length=1024, fail_fast=True)]
"""The first problem is told: a list may have a million."""


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, value: Any) -> Any:
        """Pydantic would tell of each unknown field."""
        if isinstance(value, dict) and len(value) > (most := len(cls.model_fields) + _FEW_UNKNOWN):
            raise ValueError(f"has {len(value)} fields, more than {most}")
        return value

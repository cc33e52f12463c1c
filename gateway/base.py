"""What all bodies have in common: unknown fields are refused, and no value is taken for one of another type."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictBody(BaseModel):
    # A bound on a string has it read as UTF-8, which refuses half a surrogate pair; this bound is none.
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0)

"""What all bodies have in common: unknown fields are refused, and no value is taken for one of another type."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

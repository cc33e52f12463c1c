"""What the orchestrator can be told."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from specdec.core.settings import ServiceSettings


class OrchestratorSettings(ServiceSettings):
    """Serve generation over gRPC (specdec.v1.GenerationService)."""

    target: Annotated[list[str], NoDecode] = Field(description="host:port of every target, comma-separated")
    draft: Annotated[list[str], NoDecode] = Field(
        default=[], description="host:port of every draft, comma-separated; none: the target alone"
    )
    tokenizer: str = Field("", description="tokenizer.json, a directory with one, or a hub id; none: token ids only")
    api_keys_file: str = Field("", description="who may generate: a line of `specdec key` each; none: everybody")
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None, description="draft tokens per round where a request names none; unset: as many as pay, measured"
    )
    num_ahead_tokens: int = Field(
        0, ge=0, le=256, description="tokens drafted for a sequence while its target verifies; pays if drafts have time"
    )
    num_siblings: int = Field(
        0, ge=0, le=8, description="runners-up verified beside each draft token; pays where a target's rows are free"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="no request runs longer")
    resolve_every_s: float = Field(5.0, gt=0, description="how often the names of targets and drafts are looked up")
    target_wait_s: float = Field(30.0, gt=0, description="how long a request waits for a target to be there")
    watchdog_s: float = Field(1.0, ge=0.5, description="a replica that falls silent has been left within so long")
    stuck_after_s: float = Field(
        15.0, gt=0, description="a replica that is heard but makes no pass for so long counts as lost"
    )
    max_connection_age_s: float = Field(
        0.0,
        ge=0,
        description="a client's connection is to be made anew after so long, so that clients behind a balancer spread; "
        "its requests go on; 0: never",
    )
    max_live_sequences: int = Field(256, gt=0, description="samples generated at a time")
    max_waiting_requests: int = Field(256, ge=0, description="requests that wait for their turn; more are refused")
    park_after_s: float = Field(10.0, gt=0, description="a client that reads nothing for so long gives up its replicas")

    @field_validator("target", "draft", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Comma-separated, in the environment as on the command line."""
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, list):
            return [address.strip() for part in parts for address in str(part).split(",") if address.strip()]
        return value

    @field_validator("target")
    @classmethod
    def _at_least_one(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("at least one host:port is required")
        return value

    @field_validator("target", "draft")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        for address in value:
            host, _, port = address.rpartition(":")
            if not host or " " in host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"{address!r} is not host:port")
        return value

"""The settings of the orchestrator."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from specdec.core.sequence import Method
from specdec.core.settings import FrontSettings, checked_addresses, split_at_commas


class OrchestratorSettings(FrontSettings):
    """Serve generation over gRPC (specdec.v1.GenerationService)."""

    target: Annotated[list[str], NoDecode] = Field(description="host:port of every target, comma-separated")
    draft: Annotated[list[str], NoDecode] = Field(
        default=[], description="host:port of every draft, comma-separated; empty: no drafting"
    )
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="port of OpenAI's API over HTTP, by a gateway that starts and ends with this; unset: none"
    )
    tokenizer: str = Field("", description="tokenizer.json, a directory with one, or a hub id; empty: token ids only")
    revision: str = Field("", description="branch, tag or commit of the tokenizer's hub id; empty: its main branch")
    model_name: str = Field("", description="name under which the model is served; empty: that of the target's model")
    generation_config: Literal["auto", "none"] = Field(
        "none", description="auto: defaults of sampling from the tokenizer's generation_config.json"
    )
    model_digest: str = Field(
        "", description="digest that a target's model must have, or its first 12 characters; empty: that of the first"
    )
    api_keys_file: str = Field("", description="file of API keys, one line of `specdec key` each; empty: no key needed")
    methods: Annotated[list[Method], NoDecode] = Field(
        default=list(Method),
        description="verification methods that requests may name, comma-separated: coupled, token, block; with token "
        "and block a hostile draft can steer the text",
    )
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None, description="draft tokens per round if a request names no number; unset: adapted to measured times"
    )
    num_ahead_tokens: int = Field(
        0, ge=0, le=256, description="tokens drafted ahead while the target verifies; useful if drafts have spare time"
    )
    num_siblings: int = Field(
        0, ge=0, le=8, description="runners-up verified beside each draft token; useful if a target's rows cost little"
    )
    lookup_history: int = Field(
        0,
        ge=0,
        le=1 << 26,
        description="tokens of past answers that prompt lookup searches, too, for the same API key and cache salt; "
        "about 30 bytes each; 0: none",
    )
    request_timeout_s: float = Field(600.0, gt=0, description="longest time that a request may take")
    resolve_every_s: float = Field(5.0, gt=0, description="interval of DNS look-ups of the targets and drafts")
    target_wait_s: float = Field(
        30.0, gt=0, description="how long a request waits for a usable target; after as long health is NOT_SERVING"
    )
    watchdog_s: float = Field(1.0, ge=0.5, description="a silent replica is given up within this time")
    stuck_after_s: float = Field(
        15.0, gt=0, description="a replica that sends heartbeats but completes no pass for this long is lost"
    )
    max_connection_age_s: float = Field(
        0.0,
        ge=0,
        description="age at which a client's connection is replaced, so that clients spread behind a load balancer; "
        "its requests continue; 0: never",
    )
    prefix_choice: bool = Field(
        True, description="prompts that begin alike share targets and drafts, as far as their load allows"
    )
    max_live_sequences: int = Field(256, gt=0, description="samples generated at a time")
    max_waiting_requests: int = Field(256, ge=0, description="requests in the queue; more are refused")
    park_after_s: float = Field(10.0, gt=0, description="a client that reads nothing for this long is parked")

    @field_validator("target", "draft", "methods", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_at_commas(value)

    @field_validator("methods")
    @classmethod
    def _with_the_default(cls, value: list[Method]) -> list[Method]:
        if Method.COUPLED not in value:
            raise ValueError("coupled, the method of requests that name none, is required")
        return value

    @field_validator("target")
    @classmethod
    def _at_least_one(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("at least one host:port is required")
        return value

    @field_validator("model_digest")
    @classmethod
    def _long_enough(cls, value: str) -> str:
        if 0 < len(value) < 12:
            raise ValueError("at least 12 characters are required, as `specdec doctor` shows them")
        return value

    @field_validator("target", "draft")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        return checked_addresses(value)

"""The settings of the gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from gateway.call_finder import Format
from specdec.core.settings import FrontSettings, checked_addresses, split_at_commas


class GatewaySettings(FrontSettings):
    """Serve OpenAI's API over HTTP, by the orchestrators. With tls_cert it is HTTPS, and the orchestrators are called
    with TLS."""

    orchestrator: Annotated[list[str], NoDecode] = Field(
        description="host:port of every orchestrator, comma-separated; the next one is used when one is lost"
    )
    allowed_origins: Annotated[list[str], NoDecode] = Field(
        default=[], description="web pages that may call the API from a browser, comma-separated (CORS); empty: none"
    )
    allowed_hosts: Annotated[list[str], NoDecode] = Field(
        default=[],
        description="further names of this machine, comma-separated, or *: on loopback, requests to others are refused",
    )
    served_model_name: Annotated[list[str], NoDecode] = Field(
        default=[], description="names of the model, comma-separated; answers have the first; empty: the orchestrator's"
    )
    tool_format: Literal["auto", Format] = Field(
        "auto", description="how the model writes calls of tools; auto: as its chat template says"
    )
    reasoning_format: Literal["none", "think"] = Field(
        "none", description="think: what an answer begins with, between <think> and </think>, is its reasoning"
    )
    root_path: str = Field("", description="path under which a proxy serves the gateway, such as /llm, kept or not")
    accept_unknown_fields: bool = Field(False, description="ignore fields of a body that the gateway does not know")
    keep_alive_s: float = Field(15.0, gt=0, description="silence of a stream after which a comment is sent")
    idle_connection_s: float = Field(
        75.0, gt=0, description="time after which an idle connection is closed; longer than that of proxies and clients"
    )
    max_connections: int = Field(
        1024,
        gt=0,
        description="connections at a time; beyond it the one that has waited longest for a request is closed",
    )
    request_timeout_s: float = Field(600.0, gt=0, description="longest time that a request may take")

    @field_validator("orchestrator", "allowed_origins", "allowed_hosts", "served_model_name", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_at_commas(value)

    @field_validator("root_path")
    @classmethod
    def _no_slash_at_its_end(cls, value: str) -> str:
        return value.rstrip("/")

    @field_validator("orchestrator")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("at least one host:port is required")
        return checked_addresses(value)

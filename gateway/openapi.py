"""The API as an OpenAPI document, made of the models of bodies. Knows paths; does not know requests."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.bodies import ChatBody, CompletionBody, DetokenizeBody, Generation, TokenizeBody
from gateway.responses_body import ResponsesBody

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_POSTED: dict[str, tuple[type[BaseModel], str, list[str]]] = {
    "/v1/completions": (CompletionBody, "Complete prompts", ["id", "object", "choices", "usage"]),
    "/v1/chat/completions": (ChatBody, "Answer a conversation", ["id", "object", "choices", "usage"]),
    "/v1/responses": (ResponsesBody, "Answer a conversation, in items", ["id", "object", "output", "status", "usage"]),
    "/tokenize": (TokenizeBody, "The ids of a prompt", ["tokens", "count", "max_model_len"]),
    "/detokenize": (DetokenizeBody, "The text of ids", ["prompt"]),
}
_READ: dict[str, tuple[str, list[str]]] = {
    "/v1/models": ("The served model and its adapters", ["object", "data"]),
    "/tokenizer_info": ("Special tokens and chat template", ["eos_token"]),
    "/load": ("Requests that run or wait", ["server_load"]),
    "/version": ("The version", ["version"]),
}
PATHS = (*_POSTED, *_READ)
_REFUSALS = ("400", "401", "403", "404", "408", "413", "429", "431", "503", "504")


def document(root_path: str) -> dict[str, Any]:
    models = [(model, "validation") for model, _, _ in _POSTED.values()]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for path, (model, summary, required) in _POSTED.items():
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        operation = {"summary": summary, "requestBody": {"required": True, "content": body}}
        streamed: dict[str, Any] = {"text/event-stream": {}} if issubclass(model, Generation) else {}
        paths[path] = {"post": operation | {"responses": _responses(required, streamed)}}
    for path, (summary, required) in _READ.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(required, {})}}
    for path, summary, status in (
        ("/health", "Whether a target is ready", "503"),
        ("/ping", "Whether it is alive", ""),
    ):
        statuses = {"200": {"description": "yes"}} | ({status: {"description": "no"}} if status else {})
        paths[path] = {"get": {"summary": summary, "responses": statuses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "specdec", "version": version("specdec")},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"] | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _responses(required: list[str], streamed: dict[str, Any]) -> dict[str, Any]:
    good = {"application/json": {"schema": {"type": "object", "required": required}}, **streamed}
    bad = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "the answer", "content": good},
        **{status: {"description": "an error", "content": bad} for status in _REFUSALS},
    }

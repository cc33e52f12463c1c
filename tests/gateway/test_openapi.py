"""The description of the API holds: whatever is sent that it allows, no answer is a defect, and each has its shape."""

from __future__ import annotations

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.openapi import document

EXAMPLES = int(os.environ.get("SPECDEC_SCHEMA_EXAMPLES", "60"))
"""Requests per operation; by hand 2,000."""

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
"""A value that is allowed by its type may still be refused."""


def test_the_document_is_valid_and_describes_every_field():
    description = document("/llm")
    assert description["servers"] == [{"url": "/llm"}]
    for schema in description["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    fields = description["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "top_logprobs", "num_draft_tokens", "prediction"} <= fields.keys()
    fields = description["components"]["schemas"]["ResponsesBody"]["properties"]
    assert {"input", "instructions", "text", "temperature", "num_draft_tokens"} <= fields.keys()
    paths = description["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/health"} <= paths.keys()
    assert "text/event-stream" in paths["/v1/responses"]["post"]["responses"]["200"]["content"]


@pytest.mark.slow
def test_no_request_that_the_document_allows_breaks_the_gateway(running_in_a_thread: str):
    schema = schemathesis.openapi.from_dict(document("/"))
    statuses: set[int] = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def holds(case: schemathesis.Case) -> None:
            for name in {"max_tokens", "max_output_tokens"} & (
                case.body.keys() if isinstance(case.body, dict) else set()
            ):
                case.body[name] = min(case.body[name] or 8, 8)
            response = case.call(base_url=running_in_a_thread, timeout=60)
            statuses.add(response.status_code)
            assert response.status_code != 500, response.text
            case.validate_response(response, checks=CHECKS)

        holds()
    assert {200, 400} <= statuses

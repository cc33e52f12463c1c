"""Forced calls of tools and structured output, through OpenAI's client: they follow their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from tests.checkout import DEMO
from tests.gateway.conftest import serving_demo


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    """Of a gateway in front of the demo target."""
    async with (
        serving_demo(str(DEMO / "target")) as http,
        openai.AsyncOpenAI(base_url=str(http.base_url.join("v1")), api_key="none") as client,
    ):
        yield client


def tool(name: str, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}


TOOLS = [tool("get_weather", days={"type": "integer", "minimum": 1, "maximum": 9}), tool("now")]
ASKED: dict[str, Any] = {"model": "target", "messages": [{"role": "user", "content": "How is the weather?"}], "seed": 5}


@pytest.mark.slow
async def test_forced_calls_follow_the_schemas_of_their_tools(client: openai.AsyncOpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    limits = {"max_tokens": 200, "parallel_tool_calls": False}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        completion = await client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice, **limits)
        [answer] = completion.choices
        assert answer.finish_reason == reason
        assert answer.message.content is None
        for call in answer.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name in ("get_weather", "now")
            assert 1 <= arguments["days"] <= 9 if call.function.name == "get_weather" else arguments == {}
        stream = client.chat.completions.stream(**ASKED, tools=TOOLS, tool_choice=choice, **limits)
        async with stream as events:
            final = (await events.get_final_completion()).choices[0]
        calls = [[call.function for call in one.message.tool_calls or ()] for one in (answer, final)]
        assert [(function.name, function.arguments) for function in calls[0]] == [
            (function.name, function.arguments) for function in calls[1]
        ]
        assert final.finish_reason == reason


class Order(pydantic.BaseModel):
    count: int = pydantic.Field(ge=0, le=99)
    express: bool


@pytest.mark.slow
async def test_parse_gives_an_object_of_the_clients_class(client: openai.AsyncOpenAI) -> None:
    completion = await client.chat.completions.parse(**ASKED, response_format=Order, max_tokens=200)
    assert isinstance(completion.choices[0].message.parsed, Order)
    completion = await client.chat.completions.create(**ASKED, response_format={"type": "json_object"}, max_tokens=30)
    assert (completion.choices[0].message.content or "").startswith("{")
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"if": {"type": "string"}}}}
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
        await client.chat.completions.create(**ASKED, response_format=bad)


@pytest.mark.slow
async def test_structured_outputs_have_the_names_of_vllm(client: openai.AsyncOpenAI) -> None:
    for given_, right in (
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"choice": ["aba", "bab"]}, "aba|bab"),
        ({"json": {"enum": ["aab"]}}, '"aab"'),
    ):
        completion = await client.completions.create(
            model="target", prompt="x", max_tokens=20, extra_body={"structured_outputs": given_}
        )
        assert re.fullmatch(right, completion.choices[0].text), given_

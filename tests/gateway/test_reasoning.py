"""Reasoning is split from the answer wherever it begins, counted, left out on request, and free of a schema."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.reasoning import ReasoningSplit
from gateway.tools import Parser, Reasoning
from tests.gateway.conftest import serving_demo
from tests.gateway.test_conversations import USER, with_template
from tests.gateway.test_forced_calls import TOOLS
from tests.gateway.test_tools import Called, parsed

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking is defined %}
{{ '<think>\n\n</think>\n\n' if not enable_thinking }}{% else %}<think>
{% endif %}{% endif %}"""
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 60, "temperature": 0}
THINKS_NOT: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
MAY_THINK: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}

CASES = [
    (True, "So.\n</think>\n\nHello!", "So.\n", "Hello!"),
    (True, "<think>\nSo.</think>Hello!", "\nSo.", "Hello!"),
    (True, "So <b", "So <b", ""),
    (True, "", "", ""),
    (True, "</think>Hello!", "", "Hello!"),
    (False, "<think>So.</think>\nHello!", "So.", "Hello!"),
    (False, "\n<think>So", "So", ""),
    *((within, " " * 64 + "<think>So.</think>Hello!", "So.", "Hello!") for within in (True, False)),
    (True, " " * 65 + "<think>So.</think>Hello!", " " * 65 + "<think>So.", "Hello!"),
    (False, " " * 65 + "<think>So.</think>", "", " " * 65 + "<think>So.</think>"),
    (False, "Hello </think>!", "", "Hello </think>!"),
    (False, "<thin", "", "<thin"),
]


def split(pieces: list[str], within: bool) -> tuple[str, str, float]:
    cutter = ReasoningSplit(True)
    if within:
        cutter.begin_within()
    parts = [*(cutter.feed(piece) for piece in pieces), cutter.finish()]
    return "".join(thought for thought, _ in parts), "".join(text for _, text in parts), cutter.end


@pytest.mark.parametrize(("within", "text", "thought", "rest"), CASES)
def test_reasoning_is_split_where_it_ends_however_the_text_is_cut(
    within: bool, text: str, thought: str, rest: str
) -> None:
    whole = split([text], within)
    assert whole[:2] == (thought, rest)
    assert split(list(text), within) == whole
    for at in range(len(text)):
        assert split([text[:at], text[at:]], within) == whole


@given(st.booleans(), st.lists(st.sampled_from(["<think>", "</think>", "<", "\n", "x", " "]), max_size=8))
def test_cutting_law_of_reasoning(within: bool, pieces: list[str]) -> None:
    assert split(pieces, within) == split(["".join(pieces)], within)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (Parser("hermes", reasoning=True), '<tool_call>{"name": "f"}</tool_call>'),
        (Parser("llama3_json", reasoning=True), '{"name": "f"}'),
        (Parser(named="f", reasoning=True), "{}"),
        (Parser(listed=True, reasoning=True), '[{"name": "f"}]'),
    ],
)
def test_what_follows_the_reasoning_may_be_a_call(parser: Parser, text: str) -> None:
    parser.reasoning.begin_within()
    thought, call = parsed(parser, ["So.\n</th", "ink>", "\n\n", *text])
    assert thought == Reasoning("So.\n")
    assert call == Called("f", "{}")


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway in front of the demo target, whose template opens the reasoning."""
    async with serving_demo(with_template(tmp_path, TEMPLATE), reasoning_format="think") as http:
        yield http


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def streamed(http: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """The texts of all deltas by their names, and the usage."""
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    response = await http.post("/v1/chat/completions", json={**CHAT, **fields})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    texts: dict[str, str] = {}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        for name in ("content", "reasoning", "reasoning_content"):
            texts[name] = texts.get(name, "") + (delta.get(name) or "")
    usage: dict[str, Any] = events[-1]["usage"]
    return texts, usage


@pytest.mark.slow
async def test_reasoning_that_the_template_opens_is_split_and_counted(http: httpx.AsyncClient) -> None:
    wrote = {"structured_outputs": {"choice": ["So.\n</think>\n\nHello!"]}}
    body = await chat(http, **wrote)
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("So.\n", "So.\n", "Hello!")
    texts, usage = await streamed(http, **wrote)
    assert texts == {"content": "Hello!", "reasoning": "So.\n", "reasoning_content": "So.\n"}
    assert usage["completion_tokens_details"] == body["usage"]["completion_tokens_details"]
    number = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 3 <= number < usage["completion_tokens"]
    silent = await chat(http, **wrote, include_reasoning=False)
    assert not silent["choices"][0]["message"].keys() & {"reasoning", "reasoning_content"}
    assert silent["choices"][0]["message"]["content"] == "Hello!"
    assert silent["usage"]["completion_tokens_details"]["reasoning_tokens"] == number
    back = [USER, {**message, "annotations": None}, USER]
    assert (await chat(http, messages=back, max_tokens=2))["choices"]


@pytest.mark.slow
async def test_a_schema_binds_behind_the_reasoning(http: httpx.AsyncClient) -> None:
    """A bias stands for a model that ends its reasoning."""
    ids = (await http.post("/tokenize", json={"prompt": "</think>", "add_special_tokens": False})).json()["tokens"]
    ends = {"logit_bias": {str(token_id): 30 for token_id in ids}, "temperature": 1, "seed": 3, "max_tokens": 400}
    forced = {"tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False}
    for fields in (FORMAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}, forced):
        body = await chat(http, **fields, **ends)
        message = body["choices"][0]["message"]
        assert message["reasoning"], body
        if fields is forced:
            assert message["tool_calls"][0]["function"]["name"] == "now"
        else:
            assert json.loads(message["content"]) == {"a": "b"}
        texts, _ = await streamed(http, **fields, **ends)
        assert texts["reasoning"] == message["reasoning"]
    for fields in (THINKS_NOT, {"reasoning_effort": "none"}):
        message = (await chat(http, **FORMAT, **fields))["choices"][0]["message"]
        assert "reasoning" not in message
        assert json.loads(message["content"]) == {"a": "b"}
    message = (await chat(http, **FORMAT, **MAY_THINK))["choices"][0]["message"]
    assert message.get("reasoning") or json.loads(message["content"]) == {"a": "b"}

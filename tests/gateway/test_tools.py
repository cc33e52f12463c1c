"""Calls of tools: found in texts however these are cut, and forced by grammars."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.calls import Call, Format, format_of
from gateway.server import GatewayServer
from gateway.settings import GatewaySettings
from gateway.tools import Parser, Part, Reasoning, Text
from specdec.runner.loading import grammars
from specdec.telemetry.prometheus import Scrape
from target_service.language_model import LmVerifier
from testing.raw import started
from tests.checkout import DEMO
from tests.cluster import cluster
from tests.parity.conftest import load

WEATHER = Call("get_weather", '{"city": "Zürich </tool_call>; [x]", "days": 3}')
TIME = Call("now", "{}")
ARGUMENTS = WEATHER.arguments
TEXTS: list[tuple[Format, str, list[Part]]] = [
    ("hermes", "Hello <tool", [Text("Hello <tool")]),
    (
        "hermes",
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        [Text("I look.\n"), WEATHER, TIME],
    ),
    ("hermes", '<tool_call>{"name": "now"}', [TIME]),
    ("hermes", "<tool_call>none</tool_call> after", [Text("<tool_call>none</tool_call> after")]),
    ("hermes", '<tool_call>{"a": {<tool_call> {"name": "now"} </tool_call>', [Text('<tool_call>{"a": {'), TIME]),
    ("hermes", '<tool_call>{"name": "now"} it</tool_call>', [Text('<tool_call>{"name": "now"} it</tool_call>')]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}', [WEATHER]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', [TIME, TIME]),
    ("llama3_json", "No call.", [Text("No call.")]),
    ("llama3_json", '{"a": 1}', [Text('{"a": 1}')]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]', [WEATHER]),
    ("mistral", "See: [TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now{}", [Text("See: "), TIME, TIME]),
    ("mistral", "[TOOL", [Text("[TOOL")]),
    ("pythonic", '[get_weather(city="Zürich </tool_call>; [x]", days=3), now()]', [WEATHER, TIME]),
    ("pythonic", "[1, 2] is a list", [Text("[1, 2] is a list")]),
    ("pythonic", "[now(", [Text("[now(")]),
]


def parsed(parser: Parser, pieces: Sequence[str]) -> list[Part]:
    """The parts of a text, neighbours of a kind as one."""
    joined: list[Part] = []
    for part in [part for piece in pieces for part in parser.feed(piece)] + parser.end():
        last = joined[-1] if joined else None
        if isinstance(part, (Text, Reasoning)) and type(last) is type(part):
            joined[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(("kind", "text", "parts"), TEXTS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("thought", ["", "<think>\nA < b?\n</think>\n\n"])
def test_calls_are_found_and_every_cut_of_the_text_gives_the_same(
    kind: Format, text: str, parts: list[Part], thought: str
) -> None:
    whole = thought + text
    expected = [*([Reasoning("\nA < b?\n")] if thought else []), *parts]

    def parser() -> Parser:
        return Parser(kind, reasoning=True)

    assert parsed(parser(), [whole]) == expected
    assert parsed(parser(), list(whole)) == expected
    for at in range(len(whole)):
        assert parsed(parser(), [whole[:at], whole[at:]]) == expected


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', "[TOOL_CALLS]", "[f(a=1)]", "\n", "x"),
        *("<think>", "</think>", "<|python_tag|>", '"', "{", "}", "[", "f[ARGS]{}", "é", "<", " ", "\\", "a" * 70),
    ]
)


@given(
    st.sampled_from(["hermes", "llama3_json", "mistral", "pythonic", None]),
    st.booleans(),
    st.booleans(),
    st.lists(PIECES, max_size=8).map("".join),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_cutting_law(kind: Format | None, listed: bool, reasons: bool, text: str, cuts: list[int]) -> None:
    """Every cut of any text gives the same parts."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    whole, cut = (Parser(kind, listed=listed, reasoning=reasons) for _ in range(2))
    assert parsed(cut, pieces) == parsed(whole, [text])


FORMATS: list[tuple[Format, str]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>'),
    ("llama3_json", '{"name": "f", "parameters": {"a": "%s"}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "%s"}}]'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "%s"}'),
    ("pythonic", '[f(a="%s")]'),
]


@pytest.mark.parametrize(("kind", "form"), FORMATS)
def test_arguments_are_json_in_utf_8(kind: Format, form: str) -> None:
    """Half a surrogate pair has no place in it, and is replaced; a call with a number that it has not is text."""
    for written, expected in (("\\ud800é", "\ufffdé"), ("\\udc00\\ud83d", "\ufffd" * 2), ("\\u00e9", "é")):
        [call] = parsed(Parser(kind), [form % written])
        assert isinstance(call, Call)
        assert json.loads(call.arguments.encode()) == {"a": expected}
    [named] = parsed(Parser("hermes"), ['<tool_call>{"name": "\\ud800"}'])
    assert named == Call("\ufffd", "{}")
    for number in ("1e999", "-1e999", *(() if kind == "pythonic" else ("NaN", "Infinity"))):
        text = form.replace('"%s"', number)
        assert parsed(Parser(kind), [text]) == [Text(text)]


LOOPS: list[tuple[Format, str, str, int]] = [
    ("hermes", "", "<tool_call>", 20_000),
    ("hermes", "", "<tool_call></tool_call>", 20_000),
    ("hermes", '<tool_call>{"name": "', "</tool_call>", 20_000),
    ("hermes", "", '<tool_call>{"a": {</tool_call>', 20_000),
    ("hermes", "", '<tool_call>{"name": "f"} ', 20_000),
    ("llama3_json", "{}", ";1", 200_000),
    ("mistral", "[TOOL_CALLS]f", " ", 200_000),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", 20_000),
    ("pythonic", "[f(", "a", 200_000),
]


@pytest.mark.parametrize(("kind", "begin", "again", "times"), LOOPS)
def test_a_model_that_repeats_itself_costs_as_much_as_its_text_is_long(
    kind: Format, begin: str, again: str, times: int
) -> None:
    parser = Parser(kind)
    started = time.process_time()
    parsed(parser, [begin, *([again] * times), "x"])
    assert time.process_time() - started < 20, "minutes, if each piece is a look at all of the text"


def test_the_format_is_the_templates() -> None:
    assert format_of("{{ '<tool_call>' }}") == "hermes"
    assert format_of("... [TOOL_CALLS] ...") == "mistral"
    assert format_of("<|python_tag|>") == "llama3_json"
    assert format_of("") == "hermes"


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    """Of a gateway in front of the demo target."""
    runner = load("target", "float32")
    verifier = LmVerifier(runner, grammars=grammars(DEMO / "target", runner.info))
    async with cluster([verifier], tokenizer=str(DEMO / "target")) as deployment:
        settings = GatewaySettings(orchestrator=[f"127.0.0.1:{deployment.orchestrator.port}"])
        async with (
            started(GatewayServer(settings, Scrape())) as server,
            openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client,
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

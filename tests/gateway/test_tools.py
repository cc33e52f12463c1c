"""Calls of tools: found in texts, however these are cut."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.call_finder import Format, Text, format_of
from gateway.tool_call import Arguments, Call
from gateway.tools import Parser, Part, Reasoning


@dataclass(frozen=True)
class Called:
    """A call, with its arguments in one."""

    name: str
    arguments: str = ""


WEATHER = Called("get_weather", '{"city": "Zürich </tool_call>; [x]", "days": 3}')
TIME = Called("now", "{}")
ARGUMENTS = WEATHER.arguments
CODE = Called("write", '{"text": "a\\tb\\n\\"c\\" \\\\d"}')
SCHEMAS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
    "write": {"type": "object", "properties": {"text": {"type": "string"}}},
}
TEXTS: list[tuple[Format, str, list[Part | Called]]] = [
    ("hermes", "Hello <tool", [Text("Hello <tool")]),
    (
        "hermes",
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        [Text("I look.\n"), WEATHER, TIME],
    ),
    ("hermes", '<tool_call>{"name": "now"}', [TIME]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f", "id": 1}</tool_call>', [Called("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [Called("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [TIME]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [Text('<tool_call>{"name": "f", "arguments": [1]}</tool_call>')],
    ),
    ("hermes", "<tool_call>none</tool_call> after", [Text("<tool_call>none</tool_call> after")]),
    ("hermes", '<tool_call>{"a": {<tool_call> {"name": "now"} </tool_call>', [Text('<tool_call>{"a": {'), TIME]),
    ("hermes", '<tool_call>{"name": "now"} it</tool_call>', [TIME, Text("it</tool_call>")]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}', [WEATHER]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', [TIME, TIME]),
    ("llama3_json", 'See: <|python_tag|>{"name": "now"}', [Text("See: "), TIME]),
    ("llama3_json", "No call.", [Text("No call.")]),
    ("llama3_json", ' {"a": 1} {"name": "now"}', [Text(' {"a": 1} {"name": "now"}')]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]', [WEATHER]),
    ("mistral", "See: [TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now{}", [Text("See: "), TIME, TIME]),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}", [TIME]),
    *(("mistral", text, [Text(text)]) for text in ("[TOOL", "[TOOL_CALLS] []", "[TOOL_CALLS] [1]", "[TOOL_CALLS]f")),
    ("pythonic", '[get_weather(city="Zürich </tool_call>; [x]", days=3), now()]', [WEATHER, TIME]),
    (
        "pythonic",
        "[f(a=(1, {'b': True}), c=None,), now()] x",
        [Called("f", '{"a": [1, {"b": true}], "c": null}'), TIME, Text(" x")],
    ),
    *(
        ("pythonic", text, [Text(text)])
        for text in ("[1, 2] is a list", "[now(", " No.", "[now(1)]", "[see(this) now()]")
    ),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich </tool_call>; [x]\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        [Text("I look.\n"), WEATHER, TIME],
    ),
    ("qwen3_coder", '<function=write>\n<parameter=text>\na\tb\n"c" \\d\n</parameter>\n</function>', [CODE]),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>x y</parameter><parameter=b>{'c': 1}</parameter></tool_call>",
        [Called("f", '{"a": "x y", "b": {"c": 1}}')],
    ),
    ("qwen3_coder", '<function=f>{"a": 1}</function> x', [Called("f", '{"a": 1}'), Text("x")]),
    # What models write is not always JSON.
    ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "a\tb\n\\"c\\" \\d"}}</tool_call>', [CODE]),
    ("llama3_json", '{"name": "write", "parameters": {"text": "a\tb\n\\"c\\" \\d"}}', [CODE]),
    ("mistral", '[TOOL_CALLS][{"name": "write", "arguments": {"text": "a\tb\n\\"c\\" \\d"}}]', [CODE]),
    ("pythonic", """[write(text=\'\'\'a\tb\n"c" \\d\'\'\')]""", [CODE]),
    (
        "hermes",
        "<tool_call>{'name': 'f', 'arguments': {'a': True, 'b': [1,],}}</tool_call>",
        [Called("f", '{"a": true, "b": [1]}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>x', [Called("f", '{"a": 1}'), Text("x")]),
    # A call that is broken is passed on as it is, and those behind it are found.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "b" c}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        [Called("f", '{"a": "b"c}}'), TIME],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "b}}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        [Called("f", '{"a": "b}}\\n'), TIME],
    ),
    (
        "hermes",
        '<tool_call>{"name: {}}</tool_call><tool_call>{"name": "now"}',
        [Text('<tool_call>{"name: {}}</tool_call>'), TIME],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f>x</function></tool_call><tool_call><function=now></tool_call>",
        [Called("f", "x</function>"), TIME],
    ),
    ("llama3_json", '{"name": "f", "parameters": {"a" 1}}; {"name": "now"}', [Called("f", '{"a"1}}; '), TIME]),
    ("mistral", "[TOOL_CALLS]f[ARGS]{a}[TOOL_CALLS]now{}", [Called("f", "{a}"), TIME]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a"}}, {"name": "now"}]', [Called("f", '{"a"}}, '), TIME]),
    ("pythonic", "[f(a=1, b=x), now()]", [Called("f", '{"a": 1, "b": x), '), TIME]),
    # So is one that is cut off.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 12', [Called("f", '{"a": 12')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\\u00', [Called("f", '{"a": "b\\u00')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>{x", [Called("f", '{"a": {x')]),
    ("hermes", '<tool_call>{"name": "f", "arg', [Text('<tool_call>{"name": "f", "arg')]),
]


def parsed(parser: Parser, pieces: Sequence[str]) -> list[Part | Called]:
    """The parts of a text, neighbours of a kind as one."""
    joined: list[Part | Called] = []
    for part in [part for piece in pieces for part in parser.feed(piece)] + parser.end():
        last = joined[-1] if joined else None
        if isinstance(part, Call):
            joined.append(Called(part.name))
        elif isinstance(part, Arguments):
            assert isinstance(last, Called), "arguments follow the beginning of their call"
            joined[-1] = Called(last.name, last.arguments + part.text)
        elif isinstance(part, (Text, Reasoning)) and type(last) is type(part):
            joined[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(("kind", "text", "parts"), TEXTS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("thought", ["", "<think>\nA < b?\n</think>\n\n"])
def test_calls_are_found_and_every_cut_of_the_text_gives_the_same(
    kind: Format, text: str, parts: list[Part | Called], thought: str
) -> None:
    whole = thought + text
    expected = [*([Reasoning("\nA < b?\n")] if thought else []), *parts]

    def parser() -> Parser:
        return Parser(kind, reasoning=True, tools=SCHEMAS)

    assert parsed(parser(), [whole]) == expected
    assert parsed(parser(), list(whole)) == expected
    for at in range(len(whole)):
        assert parsed(parser(), [whole[:at], whole[at:]]) == expected


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', "[TOOL_CALLS]", "[f(a=1)]", "\n", "x"),
        *(
            "<function=f>",
            "<parameter=a>",
            "</parameter>",
            "</function>",
            "'",
            "f(",
            "a=",
            ",",
            "\\ud83d",
            "\\udc00",
            "1",
        ),
        *("<think>", "</think>", "<|python_tag|>", '"', "{", "}", "[", "f[ARGS]{}", "é", "<", " ", "\\", "a" * 70),
    ]
)


@given(
    st.sampled_from([*get_args(Format), None]),
    st.booleans(),
    st.booleans(),
    st.lists(PIECES, max_size=8).map("".join),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_cutting_law(kind: Format | None, listed: bool, reasons: bool, text: str, cuts: list[int]) -> None:
    """Every cut of any text gives the same parts."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    whole, cut = (Parser(kind, listed=listed, reasoning=reasons, tools={"f": {}}) for _ in range(2))
    assert parsed(cut, pieces) == parsed(whole, [text])


@pytest.mark.parametrize("properties", [None, [], "a", {"a": None}, {"a": []}])
@pytest.mark.parametrize("types", [None, 5, {}, [{}], [5, "integer"]])
def test_a_schema_that_is_none_says_nothing_of_an_argument(properties: Any, types: Any) -> None:
    """Whatever a caller sends as one."""
    text = "<function=f><parameter=a>3</parameter></function>"
    for schema in (properties, {"a": {"type": types}}, {"a": {"anyOf": types}}, {"a": {"oneOf": [types]}}):
        parser = Parser("qwen3_coder", tools={"f": {"type": "object", "properties": schema}})
        assert parsed(parser, [text]) == [Called("f", '{"a": 3}')]


FORMATS: list[tuple[Format, str]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>'),
    ("llama3_json", '{"name": "f", "parameters": {"a": "%s"}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "%s"}}]'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "%s"}'),
    ("pythonic", '[f(a="%s")]'),
]


@pytest.mark.parametrize(("kind", "form"), FORMATS)
def test_arguments_are_json_in_utf_8(kind: Format, form: str) -> None:
    """What has no place in it is replaced: half a surrogate pair, and a number that it has not."""
    pairs = (("\\ud83d\\ude00", "\U0001f600"), ("\\ud83d\\ud83d\\ude00", "\ufffd\U0001f600"))
    halves = (("\\ud800é", "\ufffdé"), ("\\udc00\\ud83d", "\ufffd" * 2), ("\\ud83d\\u0041", "\ufffdA"))
    for written, expected in (*pairs, *halves, ("\\u00e9", "é"), ("\\x41\\u{1}\\'", "A\\u{1}'")):
        [call] = parsed(Parser(kind), [form % written])
        assert isinstance(call, Called)
        assert json.loads(call.arguments.encode()) == {"a": expected}
    [named] = parsed(Parser("hermes"), ['<tool_call>{"name": "\\ud800"}'])
    assert named == Called("\ufffd", "{}")
    for number in ("1e999", "-1e999", "NaN", "-Infinity", "9" * 400):
        [call] = parsed(Parser(kind), [form.replace('"%s"', number)])
        assert isinstance(call, Called)
        assert json.loads(call.arguments, parse_constant=pytest.fail) == {"a": None}


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
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "</tool_call> ", 20_000),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>', " ", 200_000),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "[", 200_000),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "1", 200_000),
    ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>1</parameter>", 20_000),
    ("hermes", "", " ", 200_000),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "begin", "again", "times"), LOOPS)
def test_a_model_that_repeats_itself_costs_as_much_as_its_text_is_long(
    kind: Format, begin: str, again: str, times: int
) -> None:
    def seconds(times: int) -> float:
        parser = Parser(kind, reasoning=True)
        started = time.process_time()
        for piece in itertools.chain([begin], itertools.repeat(again, times), ["x"]):
            parser.feed(piece)
        parser.end()
        return time.process_time() - started

    assert seconds(times) < 8 * seconds(times // 4), "16 times, if each piece is a look at all of the text"


def test_the_format_is_the_templates() -> None:
    assert format_of("{{ '<tool_call>' }}") == "hermes"
    assert format_of("... [TOOL_CALLS] ...") == "mistral"
    assert format_of("<|python_tag|>") == "llama3_json"
    assert format_of("") == "hermes"

"""A grammar that its compiler cannot bear is an answer to its caller, and no loss of a process that others share."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer

from specdec.core.errors import InvalidArgument, Overloaded
from specdec.sampling.grammar_sandbox import FORMATS, GrammarSandbox
from tests.models.grammars import TOKENIZER, VOCAB

pytestmark = pytest.mark.slow

SIMPLE = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
HOSTILE = {
    "a number that overflows the stack": ("json_schema", '{"const": -9223372036854775808}'),
    "such a number in a list": ("json_schema", '{"enum": [1, -9223372036854775300]}'),
    "such a number in Lark": ("grammar", 'start: %json {"const": -9223372036854775808}'),
    "patterns that multiply": ("json_schema", json.dumps({"allOf": [{"pattern": f"a.*b{i}.*c"} for i in range(26)]})),
    "a large factor": ("json_schema", '{"type": "integer", "multipleOf": 99999999}'),
    "factors that multiply": ("json_schema", '{"type": "integer", "multipleOf": 997, "allOf": [{"multipleOf": 991}]}'),
    "rules that double": (
        "grammar",
        "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(30)) + 'R30: "a"',
    ),
    "a rule that counts for ever": ("grammar", "start: a::0\na::_: a::incr(_)"),
    "many ways to skip": ("grammar", "start: " + "/a/? " * 2500),
    "deep JSON": ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
    "deep parentheses": ("regex", "(" * 12000 + "a" + ")" * 12000),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[GrammarSandbox]:
    opened = GrammarSandbox(str(TOKENIZER), VOCAB, [0])
    yield opened
    await opened.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("form", "text"), HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_grammar_is_an_invalid_argument_of_its_own_field(
    sandbox: GrammarSandbox, form: str, text: str
) -> None:
    neighbour = asyncio.create_task(sandbox.checked("json_schema", SIMPLE))
    with pytest.raises(InvalidArgument) as refused:
        await sandbox.checked(form, text)
    assert [name for name, _ in refused.value.violations] == [form]
    assert await neighbour == await sandbox.checked("json_schema", SIMPLE)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("json_schema", "{", "is not JSON"),
        ("json_schema", '{"if": {"type": "string"}}', "Unimplemented keys"),
        ("json_schema", '{"allOf": [{"$ref": "#"}]}', "."),
        ("regex", "(", "unclosed group"),
        ("grammar", "start: other", "other"),
    ],
)
async def test_a_bad_grammar_is_refused_in_words(sandbox: GrammarSandbox, form: str, text: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{form}: .*{problem}"):
        await sandbox.checked(form, text)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_format_that_no_grammar_stands_for_is_an_annotation(sandbox: GrammarSandbox) -> None:
    """Those that are known bind. What is no format stays: data, and properties of that name."""

    def schema(text: dict[str, object]) -> str:
        data = {"const": {"format": "path"}}
        names = {"format": text, "default": {"anyOf": [{"type": "null"}, text]}, "a": data}
        return json.dumps({"type": "object", "properties": names, "$defs": {"format": text}})

    plain = await sandbox.checked("json_schema", schema({"type": "string"}))
    for name in ("path", "password", "binary", "uuid4", "regex", "iri", "json-pointer", "decimal", "no such format"):
        assert await sandbox.checked("json_schema", schema({"type": "string", "format": name})) == plain
    for name in FORMATS:
        assert await sandbox.checked("json_schema", schema({"type": "string", "format": name})) != plain
    assert json.loads(plain)["grammars"][0]["json_schema"]["properties"]["a"] == {"const": {"format": "path"}}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_caller_that_leaves_gets_no_answer_of_another(sandbox: GrammarSandbox) -> None:
    for pause_s in (0.0, 0.001, 0.01):
        leaving = asyncio.create_task(sandbox.checked("choices", '["left"]'))
        await asyncio.sleep(pause_s)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    answers = await asyncio.gather(*(sandbox.checked("choices", json.dumps([f"text {i}"])) for i in range(12)))
    assert all(f"text {i}" in answer for i, answer in enumerate(answers))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_child_that_was_killed_says_nothing_of_the_grammar(sandbox: GrammarSandbox) -> None:
    await asyncio.gather(*(sandbox.checked("json_schema", SIMPLE) for _ in range(2)))
    kill_children()
    answers = await asyncio.gather(*(sandbox.checked("regex", "[a-f]+") for _ in range(2)), return_exceptions=True)
    assert all(isinstance(answer, Overloaded) for answer in answers)
    assert await sandbox.checked("regex", "[a-f]+")


def kill_children() -> None:
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if b"grammar_sandbox" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        ("json_schema", SIMPLE, '{"a": 1}'),
        ("regex", "[a-f]+", "fade"),
        ("choices", '["yes"]', "yes"),
        ("grammar", 'start: "x"', "x"),
    ],
)
async def test_a_grammar_binds_behind_reasoning(sandbox: GrammarSandbox, form: str, text: str, answer: str) -> None:
    tokenizer = LLTokenizer(str(TOKENIZER), n_vocab=VOCAB, eos_token=[0])
    for reasoning, right, wrong in (
        ("none", [answer], ["So.</think>" + answer]),
        ("open", ["So.\n</think>\n\n" + answer, "</think>" + answer], ["So.</think>!"]),
        ("may open", [answer, "<think>So.\n</think>\n\n" + answer], ["So.", "<think>So.</think>!"]),
    ):
        matcher = LLMatcher(tokenizer, await sandbox.checked(form, text, reasoning), log_level=0)  # type: ignore[arg-type]
        for output in (*right, *wrong):
            copy, ids = matcher.deep_copy(), tokenizer.tokenize_str(output)
            matches = copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()
            assert matches is (output in right), (reasoning, output)

"""The second turn: what clients keep in a history comes back, and changes nothing but what it says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import DEMO
from tests.gateway.conftest import Running, serving
from tests.orchestrator.tokenizer.template_styles import STYLES

USER = {"role": "user", "content": "How is it?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CACHED = {"cache_control": {"type": "ephemeral"}}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 4, "seed": 1}


def answered(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "Fine.", **fields}


def called(**fields: Any) -> dict[str, Any]:
    return {**CALLS, "tool_calls": [{**CALL, **fields}]}


SAME: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "nulls": (
        [USER, answered(), USER],
        [{**USER, "name": None}, answered(tool_calls=None, refusal=None, audio=None, function_call=None), USER],
    ),
    "empty lists": ([USER, answered(), USER], [USER, answered(tool_calls=[], annotations=[], images=[]), USER]),
    "an answer of other servers": (
        [USER, answered(), USER],
        [
            USER,
            answered(annotations=[{"type": "url_citation"}], reasoning_details=[{}], provider_specific={"a": 1}),
            USER,
        ],
    ),
    "reasoning by its other name": (
        [USER, called(), {**CALLS, "reasoning": "Hm."}, RESULT],
        [USER, called(), {**CALLS, "reasoning": None, "reasoning_content": "Hm."}, RESULT],
    ),
    "marks of caches": (
        [{**USER, "content": [{"type": "text", "text": "a"}]}],
        [{**USER, **CACHED, "content": [{"type": "text", "text": "a", **CACHED}]}],
    ),
    "parts of other shapes": (
        [{**USER, "content": [{"type": "text", "text": "a"}]}, answered(content=[{"type": "text", "text": "b"}]), USER],
        [{**USER, "content": [{"text": "a"}]}, answered(content=[{"type": "output_text", "text": "b"}]), USER],
    ),
    "an index of a call": ([USER, called(), RESULT], [USER, called(index=0, extra_content={}), RESULT]),
    "a call without a kind": ([USER, called(), RESULT], [USER, called(type=None), RESULT]),
    "an absent content": ([USER, called(), RESULT], [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT]),
    "arguments as an object": (
        [USER, called(), RESULT],
        [USER, called(function={"name": "f", "arguments": {"a": 1}}), RESULT],
    ),
    "no arguments": (
        [USER, called(function={"name": "f", "arguments": "{}"}), RESULT],
        [USER, called(function={"name": "f", "arguments": None}), RESULT],
    ),
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return with_template(tmp_path, STYLES["Qwen 3"].source)


def with_template(directory: Path, source: str) -> str:
    """The demo target's tokenizer with another template."""
    there = shutil.copytree(DEMO / "target", directory / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    (there / "chat_template.jinja").write_text(source)
    return str(there)


async def prompt(running: Running, **body: Any) -> list[int]:
    response = await running.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["tokens"]
    return ids


async def test_what_clients_keep_in_a_history_changes_nothing(tokenizer: str) -> None:
    async with serving(tokenizer=tokenizer) as running:
        for name, (messages, kept) in SAME.items():
            response = await running.http.post("/v1/chat/completions", json={**CHAT, "messages": kept})
            assert response.status_code == 200, (name, response.text)
            assert await prompt(running, messages=messages) == await prompt(running, messages=kept), name


async def test_what_says_something_is_not_ignored(tokenizer: str) -> None:
    async with serving(tokenizer=tokenizer) as running:
        for name, message in (
            *((f"messages[1].{name}", answered(**{name: "a"})) for name in ("audio", "refusal", "function_call")),
            ("messages[1].content[0].type", answered(content=[{"type": "image_url", "image_url": {}}])),
            ("messages[1].content[0].text", answered(content=[{"type": "text", **CACHED}])),
            ("messages[1].content", answered(content=1)),
            ("messages[1].tool_calls[0].function.name", called(function={"arguments": "{}"})),
        ):
            response = await running.http.post("/v1/chat/completions", json={**CHAT, "messages": [USER, message]})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name), error
            if isinstance(message["content"], list):
                assert "valid string" not in error["message"], "the client chose parts"


@pytest.mark.parametrize("arguments", ['{"a": "b', "[1]", "", '{"a": "\\ud800"}', '{"a": ' * 200, "{\n\n"])
async def test_broken_arguments_do_not_end_a_session(tokenizer: str, arguments: str) -> None:
    messages = [USER, called(function={"name": "f", "arguments": arguments}), RESULT]
    async with serving(tokenizer=tokenizer) as running:
        response = await running.http.post("/v1/chat/completions", json={**CHAT, "messages": messages})
        assert response.status_code == 200, response.text
        ids = await prompt(running, messages=messages)
        shown = (await running.http.post("/detokenize", json={"tokens": ids})).json()["prompt"]
        assert f'"arguments": {arguments or "{}"}}}' in shown


async def test_the_second_step_of_a_loop_of_tools_with_the_template_of_the_demo() -> None:
    async with serving() as running:
        for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
            step = {"role": "assistant", **content, "tool_calls": [CALL]}
            body = {**CHAT, "messages": [USER, step, RESULT], "tools": [TOOL]}
            response = await running.http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text


async def test_unknown_fields_are_ignored_at_every_depth_if_the_server_says_so() -> None:
    odd = {"no_such_field": 1}
    deep: list[dict[str, Any]] = [
        odd,
        {"stream": True, "stream_options": {"include_usage": True, **odd}},
        {"response_format": {"type": "text", **odd}},
        {"prediction": {"type": "content", "content": "a", **odd}},
        {"tools": [{**TOOL, **odd}], "tool_choice": "none"},
        {"stream_options": {f"field_{number}": 1 for number in range(100)}},
    ]
    async with serving() as strict, serving(gateway={"accept_unknown_fields": True}) as running:
        for fields in deep:
            body = {**CHAT, **fields}
            assert (await running.http.post("/v1/chat/completions", json=body)).status_code == 200, fields
            in_tools = "tools" in fields
            assert (await strict.http.post("/v1/chat/completions", json=body)).status_code == (200 if in_tools else 400)


async def test_what_asks_for_nothing_is_no_error() -> None:
    empty = {"logit_bias": {}, "stop": [], "bad_words": [], "documents": [], "metadata": {}, "stream_options": {}}
    either: list[dict[str, Any]] = [
        {"best_of": 1},
        {"best_of": 2, "n": 2},
        {"store": True},
        {"use_beam_search": False, "length_penalty": 1.0},
        {"max_tokens": 6.0, "n": 1.0, "top_k": -1.0, "temperature": 1.0, "priority": 0.0},
        {"stop": "", "user": "", "guided_json": None, "stream_options": {"include_usage": False}},
        empty,
    ]
    chat: list[dict[str, Any]] = [
        {"tools": [], "tool_choice": "auto", "functions": [], "modalities": []},
        {"tools": None, "tool_choice": None, "function_call": None, "audio": None, "chat_template": ""},
        {"top_logprobs": 0, "logprobs": False},
        {"tools": [{**TOOL, **CACHED, "function": {**TOOL["function"], "strict": None, **CACHED}}]},  # type: ignore[dict-item]
    ]
    async with serving() as running:
        for fields in (*either, *chat):
            response = await running.http.post("/v1/chat/completions", json={**CHAT, **fields})
            assert response.status_code == 200, (fields, response.text)
        for fields in (*either, {"suffix": ""}):
            body = {"prompt": "a", "max_tokens": 4, **fields}
            response = await running.http.post("/v1/completions", json=body)
            assert response.status_code == 200, (fields, response.text)
        for fields in (
            {"best_of": 2},
            {"best_of": 3, "n": 2},
            {"use_beam_search": True},
            {"n": 1.5},
            {"guided_json": {}},
        ):
            assert (await running.http.post("/v1/completions", json={"prompt": "a", **fields})).status_code == 400, (
                fields
            )


async def test_tools_are_tokenized(tokenizer: str) -> None:
    async with serving(tokenizer=tokenizer) as running:
        without = await prompt(running, messages=[USER])
        assert len(await prompt(running, messages=[USER], tools=[TOOL])) > len(without)
        assert await prompt(running, messages=[USER], tools=[]) == without
        chat = {**CHAT, "tools": [TOOL], "return_token_ids": True}
        body = (await running.http.post("/v1/chat/completions", json=chat)).json()
        assert body["prompt_token_ids"] == await prompt(running, messages=[USER], tools=[TOOL])


async def test_an_effort_of_reasoning_reaches_the_template(tmp_path: Path) -> None:
    source = "{{ messages[0].content }} {{ reasoning_effort }} {{ enable_thinking }}"
    async with serving(tokenizer=with_template(tmp_path, source)) as running:
        for fields, expected in (
            ({"reasoning_effort": "low"}, "How is it? low "),
            ({"reasoning_effort": "none"}, "How is it? none False"),
            ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "How is it? none True"),
            ({"reasoning_effort": None}, "How is it?  "),
        ):
            chat = {**CHAT, **fields, "return_token_ids": True}
            ids = (await running.http.post("/v1/chat/completions", json=chat)).json()["prompt_token_ids"]
            shown = (await running.http.post("/detokenize", json={"tokens": ids})).json()["prompt"]
            assert shown == expected

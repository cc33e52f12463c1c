"""Templates of many families get contents and arguments in the form that they take, and leave out nothing silently."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from orchestrator.tokenizer.chat_template import ChatTemplate, Conversation
from orchestrator.tokenizer.files import find
from orchestrator.tokenizer.forms import short_id
from specdec.core.errors import InvalidArgument
from tests.orchestrator.tokenizer.template_styles import NO_CALLS, STYLES, Style

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "now", "parameters": PARAMETERS}}]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(number: int, arguments: str = '{"city": "Zürich <3>", "days": 3}') -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def thought(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text, "thinking": text}


def result(number: int, content: Any = "sunny") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "weather", "content": content}


USER = {"role": "user", "content": "How is it?"}
SYSTEM = {"role": "system", "content": "Be short."}
ANSWER = {"role": "assistant", "content": "It is fine."}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call(1)]}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "talk": [USER, ANSWER, USER],
    "system": [SYSTEM, USER, ANSWER, USER],
    "parts": [{**USER, "content": parts("How", "is it?")}, ANSWER, USER],
    "all in parts": [
        {**SYSTEM, "content": parts("Be", "short.")},
        {**USER, "content": parts("How")},
        {**ANSWER, "content": parts("It is", "fine.")},
        USER,
    ],
    "a call": [USER, CALLS, result(1)],
    "a call in parts": [USER, CALLS, result(1, parts("sun", "ny"))],
    "an absent content": [USER, {"role": "assistant", "tool_calls": [call(1)]}, result(1), ANSWER, USER],
    "several calls": [
        USER,
        {**CALLS, "tool_calls": [call(1), call(2, "{}")]},
        result(1),
        result(2, "rain"),
        ANSWER,
        USER,
    ],
    "an id as OpenAI's": [
        USER,
        {**CALLS, "tool_calls": [{**call(1), "id": "call_0a1b2c3d4e5f"}]},
        {**result(1), "tool_call_id": "call_0a1b2c3d4e5f"},
        ANSWER,
        USER,
    ],
    "text beside calls": [USER, {**CALLS, "content": "I look."}, result(1)],
    "reasoning": [
        USER,
        {**ANSWER, **thought("Well.")},
        USER,
        {**CALLS, **thought("Hm.")},
        result(1),
    ],
}


def apart(style: Style, message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls", [])
    alone = [{**CALLS, "tool_calls": [each]} for each in calls[1:]] if style.one_call else []
    message = {**message, "tool_calls": calls[:1]} if alone else message
    if style.apart and calls and message.get("content"):
        return [{"role": "assistant", "content": message["content"]}, {**message, "content": None}, *alone]
    return [message, *alone]


def as_the_style_has_it(style: Style, message: dict[str, Any]) -> dict[str, Any]:
    """A message in the form that the table names."""
    content, role = message.get("content"), message["role"]
    given = {**message}
    if content is None and message.get("tool_calls"):
        given |= {"content": {"empty": "", "empty part": parts(""), "null": None, "absent": None}[style.nothing]}
        if style.nothing == "absent":
            del given["content"]
    elif isinstance(content, list):
        text = "\n".join(part["text"] for part in content)
        if role in style.first_part:
            given["content"] = parts(text) if role in style.walks else text
        elif role not in (*style.walks, *style.shows_parts):
            given["content"] = text
    elif role in style.walks:
        given["content"] = parts(content)
    for called in message.get("tool_calls", ()) if style.arguments == "object" else ():
        function = {**called["function"], "arguments": json.loads(called["function"]["arguments"])}
        others = given["tool_calls"] if given["tool_calls"] is not message["tool_calls"] else []
        given["tool_calls"] = [*others, {**called, "function": function}]
    if style.short_ids:
        given |= {"tool_call_id": short_id(given["tool_call_id"])} if "tool_call_id" in given else {}
        given |= {"tool_calls": [{**each, "id": short_id(each["id"])} for each in given.get("tool_calls", ())]}
        given = {name: value for name, value in given.items() if value != []}
    return given


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", STYLES)
def test_the_prompt_is_that_of_transformers_for_the_form_that_the_template_takes(name: str, conversation: str) -> None:
    style, messages = STYLES[name], CONVERSATIONS[conversation]
    given = Conversation(messages, TOOLS)
    try:
        # What apply_chat_template calls, which drops what is null before, also where a template needs it.
        [expected], _ = render_jinja_template(
            [[as_the_style_has_it(style, part) for message in messages for part in apart(style, message)]],
            tools=TOOLS,
            chat_template=style.source,
            add_generation_prompt=True,
            **TOKENS,
        )
    except Exception:  # the template refuses it, in its own words
        with pytest.raises(InvalidArgument):
            template(style).render(given)
    else:
        assert template(style).render(given) == expected


@pytest.mark.slow
def test_most_templates_render_most_conversations() -> None:
    """The test above compares texts, not refusals alone."""
    refused = []
    for name, style in STYLES.items():
        for conversation, messages in CONVERSATIONS.items():
            try:
                template(style).render(Conversation(messages, TOOLS))
            except InvalidArgument:
                refused.append((name, conversation))
    # Some families have no system prompt, no roles of tools, or one call at a time.
    assert len(refused) <= len(STYLES) * len(CONVERSATIONS) / 10, refused


@pytest.mark.parametrize("name", STYLES)
def test_a_template_that_leaves_something_out_is_reported_at_load(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        template(STYLES[name])
    forms, *warnings = caplog.records
    assert forms.arguments == STYLES[name].arguments  # type: ignore[attr-defined]
    lost = set(STYLES[name].lost)
    assert [set(warning.parts) for warning in warnings] == ([lost] if lost else [])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("kind", ["calls", "content", "parts"])
def test_nothing_that_was_said_or_called_is_missing_from_the_prompt(name: str, kind: str) -> None:
    style = STYLES[name]
    messages = CONVERSATIONS[{"calls": "a call", "content": "talk", "parts": "parts"}[kind]]
    try:
        prompt = template(style).render(Conversation(messages, TOOLS))
    except InvalidArgument:
        return
    assert "is it?" in prompt
    if kind != "calls":
        assert "It is fine." in prompt
    elif not set(style.lost) & set(NO_CALLS):
        assert all(word in prompt for word in ("weather", "city", "Zürich <3>", "days", "sunny"))


@pytest.mark.parametrize("name", STYLES)
def test_a_developer_is_heard(name: str) -> None:
    """Under this role where the template shows it, as the system elsewhere, or refused where there is no system."""
    said = {"role": "developer", "content": "Be short."}
    try:
        prompt = template(STYLES[name]).render(Conversation([said, USER]))
    except InvalidArgument:
        with pytest.raises(InvalidArgument):
            template(STYLES[name]).render(Conversation([SYSTEM, USER]))
    else:
        assert "Be short." in prompt


def template(style: Style) -> ChatTemplate:
    return ChatTemplate({"default": style.source}, TOKENS)


@pytest.mark.parametrize("name", ["Qwen 2.5", "Qwen 3 Coder", "DeepSeek V3", "Mistral", "OLMo", "Kimi K2"])
@pytest.mark.parametrize("text", ['{"city": "Zür', "[1]", "no JSON", '{"a": "\\ud800"}', '{"a": ' * 200])
def test_broken_arguments_are_shown(name: str, text: str) -> None:
    broken = {**CALLS, "tool_calls": [call(1, text)]}
    prompt = template(STYLES[name]).render(Conversation([USER, broken, result(1)], TOOLS))
    assert text in prompt or json.dumps(text, ensure_ascii=False) in prompt


def test_forms_are_those_of_the_template_that_is_used(tmp_path: Path) -> None:
    """With tools it may be another one, in a directory of its own."""
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(STYLES["LLaVA"].source)
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(STYLES["DeepSeek V3"].source)
    files = find(str(tmp_path))
    assert files is not None
    both = ChatTemplate.read(files)
    assert both is not None
    assert "USER: How is it?" in both.render(Conversation([USER]))
    assert "<|User|>How is it?" in both.render(Conversation([USER, CALLS, result(1)], TOOLS))
    assert both.source == STYLES["LLaVA"].source

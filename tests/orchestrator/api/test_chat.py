"""Chat: what is wrong with a conversation is named, and a good one becomes the ids of its template's text."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from tokenizers import processors

from orchestrator.api.chat import chat_problems, conversation
from orchestrator.api.prompts import Prompts
from orchestrator.api.request_reader import RequestReader
from orchestrator.tokenizer.chat_template import ChatTemplate
from orchestrator.tokenizer.defaults import Defaults
from specdec.core.errors import ContextExceeded, InvalidArgument
from specdec.core.rounds import ModelInfo
from specdec.runner.vocabulary import read_tokenizer
from specdec.v1 import generation_pb2
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.checkout import DEMO, TOKENIZER
from tests.cluster import cluster

TARGET = ModelInfo("target", "digest", 4096, "", context_length=64, eos_token_ids=(0,))
SOURCE = """{{ bos_token }}{% for m in messages %}
{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
TEMPLATE = ChatTemplate({"default": SOURCE}, {"bos_token": "<|endoftext|>"})
USER = {"role": "user", "content": "hello"}


def prompts(template: ChatTemplate | None = TEMPLATE) -> Prompts:
    return Prompts(read_tokenizer(TOKENIZER), template)


def ids_of(text: str) -> list[int]:
    return read_tokenizer(TOKENIZER).encode(text, add_special_tokens=False).ids


def read(found: Prompts, chat: dict[str, Any], **fields: Any) -> list[int]:
    message = generation_pb2.GenerateRequest(chat=chat, **fields)
    reader = RequestReader(found)
    return list(reader.read(message, TARGET, reader.check(message, TARGET)).prompt_ids)


def refused(chat: dict[str, Any], found: Prompts | None = None, **fields: Any) -> dict[str, str]:
    with pytest.raises(InvalidArgument) as caught:
        read(found or prompts(), chat, **fields)
    return dict(caught.value.violations)


def test_a_conversation_is_the_text_of_its_template():
    begun = "<|endoftext|>user: hello\n"
    assert read(prompts(), {"messages": [USER]}) == ids_of(begun + "assistant:")
    assert read(prompts(), {"messages": [USER], "add_generation_prompt": False}) == ids_of(begun)
    answered = [USER, {"role": "assistant", "content": "hi"}]
    continued = {"messages": answered, "continue_final_message": True}
    assert read(prompts(), continued) == ids_of(f"{begun}assistant: hi")


def test_the_last_tokens_of_a_prompt_can_be_kept():
    ids = ids_of("<|endoftext|>user: hello\nassistant:")
    assert read(prompts(), {"messages": [USER]}, truncate_prompt_tokens=3) == ids[-3:]
    assert read(prompts(), {"messages": [{**USER, "content": "hello " * 100}]}, truncate_prompt_tokens=3) == ids[-3:]
    assert read(prompts(), {"messages": [USER]}, truncate_prompt_tokens=1000) == ids


def test_there_are_never_two_tokens_of_the_beginning():
    found = prompts()
    assert found.tokenizer is not None
    found.tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    expected = ids_of("<|endoftext|>user: hello\nassistant:")
    for fields in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        assert read(found, {"messages": [USER]}, **fields) == expected
    text = generation_pb2.GenerateRequest(text="hello")
    assert list(found.ids(text)) == [0, *ids_of("hello")]
    text.add_special_tokens = False
    assert list(found.ids(text)) == ids_of("hello")


def test_tools_and_variables_reach_the_template():
    template = ChatTemplate({"default": "{{ tools | tojson }}{{ mood }}{{ messages[0].tool_calls[0] | tojson }}"}, {})
    call = {"id": "1", "name": "add", "arguments_json": '{"a": [1]}'}
    chat = generation_pb2.ChatMessages(
        messages=[{"role": "assistant", "tool_calls": [call]}],
        tools_json='[{"name": "add"}]',
        template_kwargs_json='{"mood": "calm"}',
    )
    expected = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": [1]}}}
    assert template.render(conversation(chat)) == f'[{{"name": "add"}}]calm{json.dumps(expected)}'


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ({}, "chat.messages"),
        ({"messages": [{"content": "a"}]}, "chat.messages[0].role"),
        ({"messages": [{"role": "r" * 65}]}, "chat.messages[0].role"),
        ({"messages": [USER, {"role": "a", "tool_calls": [{"id": "1"}]}]}, "chat.messages[1].tool_calls[0].name"),
        ({"messages": [{**USER, "content_parts": ["a"]}]}, "chat.messages[0].content_parts"),
        ({"messages": [USER], "tools_json": "{}"}, "chat.tools_json"),
        ({"messages": [USER], "tools_json": "[" * 10_000}, "chat.tools_json"),
        ({"messages": [USER], "template_kwargs_json": "[]"}, "chat.template_kwargs_json"),
        ({"messages": [USER], "template_kwargs_json": '{"messages": []}'}, "chat.template_kwargs_json"),
        (
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "chat.continue_final_message",
        ),
        ({"messages": [{"role": "user"}], "continue_final_message": True}, "chat.continue_final_message"),
        ({"messages": [USER] * 1025}, "chat.messages"),
        ({"messages": [{**USER, "content": "a" * (1 << 20)}]}, "chat"),
    ],
)
def test_what_is_wrong_with_a_conversation_is_named(chat, field):
    assert list(refused(chat)) == [field]


DEEP, HALF = '{"a": ' * 100 + "[]" + "}" * 100, '{"a": "\\ud800"}'


@pytest.mark.parametrize("text", [DEEP, '{"a": ' * 900 + "1" + "}" * 900, "[" * 10_000, HALF, '{"\\udfff": 1}'])
def test_json_that_no_prompt_can_show_is_refused_by_the_name_of_its_field(text):
    for chat, field in (
        ({"messages": [USER], "template_kwargs_json": text}, "chat.template_kwargs_json"),
        ({"messages": [USER], "tools_json": f"[{text}]"}, "chat.tools_json"),
    ):
        assert list(refused(chat)) == [field]


@pytest.mark.parametrize("text", ['{"a": "b', "[1]", "null", "x", DEEP, HALF, '{"a": ' * 900 + "1" + "}" * 900])
@pytest.mark.parametrize(
    ("shows", "expected"),
    [("arguments", "{}"), ("arguments | string | trim", "{}"), ("arguments.items() | list", "[('arguments', {!r})]")],
)
def test_arguments_that_a_model_broke_are_shown_as_they_are(text: str, shows: str, expected: str) -> None:
    """A session whose history has them would be lost otherwise. A template that needs an object gets one."""
    source = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}{{ call.function.SHOWS }}{% endfor %}"
    template = ChatTemplate({"default": source.replace("SHOWS", shows) + "{% endfor %}"}, {})
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments_json": text}]}
    chat = generation_pb2.ChatMessages(messages=[called])  # type: ignore[list-item]
    assert not list(chat_problems(chat))
    assert template.render(conversation(chat)) == expected.format(text)


def test_json_may_be_deep_and_have_any_character():
    shown = prompts(ChatTemplate({"default": "{{ a | tojson(indent=1) }}"}, {}))
    for text in (DEEP[6:-1], '{"a": "\\ud83d\\ude00"}'):
        assert read(
            shown,
            {"messages": [USER], "template_kwargs_json": text, "tools_json": f"[{DEEP[12:-2]}]"},
            truncate_prompt_tokens=8,
        )


def test_a_model_without_a_template_cannot_chat():
    assert refused({"messages": [USER]}, prompts(None)) == {"chat": "this model has no chat template"}
    assert list(refused({"messages": [USER]}, Prompts(None))) == ["chat"]


def test_a_conversation_that_is_too_long_is_refused():
    with pytest.raises(ContextExceeded):
        read(prompts(), {"messages": [{**USER, "content": "hello " * 100}]})


def test_special_tokens_are_not_added_to_ids():
    message = generation_pb2.GenerateRequest(token_ids={"token_ids": [1]}, add_special_tokens=True)
    with pytest.raises(InvalidArgument, match="add_special_tokens"):
        RequestReader(prompts()).check(message, TARGET)


def test_defaults_of_the_server_hold_for_absent_fields():
    defaults = Defaults(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.0)
    message = generation_pb2.GenerateRequest(token_ids={"token_ids": [1]}, top_k=0, top_p=0.5)
    reader = RequestReader(prompts(), defaults)
    sampling = reader.read(message, TARGET, reader.check(message, TARGET)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 0, 0.5)


async def test_a_server_tokenizes_chats_and_tells_what_it_serves():
    table = Table(vocab_size=4096)
    verifier, drafter = TableVerifier(table), TableDrafter(table)
    for each in (verifier, drafter):
        each.info = dataclasses.replace(each.info, tokenizer_fingerprint="")
    settings = {"tokenizer": str(DEMO / "target"), "model_name": "small"}
    async with cluster([verifier], [drafter], **settings) as running:
        client = running.client
        info = await client.server_info()
        assert (info.model_name, info.tokenizer.bos_token) == ("small", "<|endoftext|>")
        assert info.tokenizer.chat_template.startswith("{% for message in messages %}")
        text = "naïve 東京"
        found = await client.tokenize(text=text)
        assert list(found.token_ids) == ids_of(text)
        assert b"".join(found.tokens) == text.encode()
        assert await client.detokenize(found.token_ids) == text
        assert await client.detokenize([0, *found.token_ids], skip_special_tokens=True) == text
        assert await client.detokenize([0]) == "<|endoftext|>"
        chat = {"messages": [USER]}
        prompt = await client.tokenize(chat=chat)
        fields: dict[str, Any] = dict(max_tokens=8, temperature=0.0, seed=1)
        [of_chat] = await client.generate(chat=chat, **fields)
        [of_ids] = await client.generate(token_ids={"token_ids": prompt.token_ids}, **fields)
        assert of_chat.token_ids == of_ids.token_ids
        assert of_chat.finish.usage.prompt_tokens == len(prompt.token_ids)
        with pytest.raises(InvalidArgument, match="text"):
            await client.tokenize(text="")
        with pytest.raises(InvalidArgument, match=r"chat\.messages"):
            await client.tokenize(chat={})


async def test_a_server_without_a_tokenizer_refuses_texts():
    table = Table(vocab_size=64)
    async with cluster([TableVerifier(table)], []) as running:
        assert not (await running.client.server_info()).HasField("tokenizer")
        with pytest.raises(InvalidArgument, match="no tokenizer"):
            await running.client.tokenize(text="a")
        with pytest.raises(InvalidArgument, match="no tokenizer"):
            await running.client.detokenize([1])

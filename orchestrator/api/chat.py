"""Chat messages of a request: their checks, and the conversation that a chat template renders.

Knows the contract's messages; does not know templates.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from orchestrator.tokenizer.chat_template import GIVEN, Conversation
from orchestrator.tokenizer.forms import MAX_DEPTH, is_deep, is_sound
from specdec.v1 import generation_pb2

MAX_MESSAGES = 1024
"""Templates may walk through all messages for each message."""

MAX_ROLE_CHARACTERS = 64


def text_length(chat: generation_pb2.ChatMessages) -> int:
    """Bytes of all texts of a conversation, about. Its messages are few (see ``size_problems``)."""
    return chat.ByteSize()


def chat_problems(chat: generation_pb2.ChatMessages) -> Iterator[tuple[str, str]]:
    """(field, problem) for what is wrong with a conversation, whatever its model's template is."""
    if not chat.messages:
        yield "chat.messages", "must not be empty"
    for index, message in enumerate(chat.messages):
        yield from ((f"chat.messages[{index}].{name}", what) for name, what in _message_problems(message))
    yield from _json_problems("chat.tools_json", chat.tools_json, is_list=True)
    yield from _json_problems("chat.template_kwargs_json", chat.template_kwargs_json, taken=GIVEN)
    if chat.continue_final_message:
        if chat.add_generation_prompt:
            yield "chat.continue_final_message", "not possible with add_generation_prompt"
        if chat.messages and not (chat.messages[-1].content or any(chat.messages[-1].content_parts)):
            yield "chat.continue_final_message", "the last message has no content to continue"


def conversation(chat: generation_pb2.ChatMessages) -> Conversation:
    """A conversation without problems, as templates expect it."""
    continues = chat.continue_final_message
    return Conversation(
        messages=[_message(message) for message in chat.messages],
        tools=json.loads(chat.tools_json or "[]"),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues,
        continues=continues,
        variables=json.loads(chat.template_kwargs_json or "{}"),
    )


def _message_problems(message: generation_pb2.ChatMessage) -> Iterator[tuple[str, str]]:
    if not 1 <= len(message.role) <= MAX_ROLE_CHARACTERS:
        yield "role", f"must have 1 to {MAX_ROLE_CHARACTERS} characters"
    for index, call in enumerate(message.tool_calls):
        if not call.name:
            yield f"tool_calls[{index}].name", "must not be empty"
    if message.HasField("content") and message.content_parts:
        yield "content_parts", "not possible with content"


def _message(message: generation_pb2.ChatMessage) -> dict[str, Any]:
    content: Any = message.content if message.HasField("content") else None
    if message.content_parts:
        content = [{"type": "text", "text": text} for text in message.content_parts]
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json or "{}"},
            }
            for call in message.tool_calls
        ]
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        # Templates use any of these names.
        fields["reasoning"] = fields["reasoning_content"] = fields["thinking"] = message.reasoning
    return fields


def _json_problems(
    name: str, text: str, is_list: bool = False, taken: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Of a JSON object without the keys ``taken``, or a list of objects; an empty text is neither, and right."""
    try:
        value = json.loads(text or ("[]" if is_list else "{}"))
        objects = value if is_list and isinstance(value, list) else [value]
        if is_list is not isinstance(value, list) or not all(isinstance(entry, dict) for entry in objects):
            yield name, f"must be a JSON {'list of objects' if is_list else 'object'}"
        elif is_deep(value):
            raise RecursionError
        elif not is_sound(text, value):
            yield name, "must not have half a surrogate pair"
        elif refused := sorted(key for key in taken if key in value):
            yield name, f"cannot set {refused[0]}"
    except RecursionError:
        yield name, f"must not be nested more than {MAX_DEPTH} deep"
    except ValueError as error:
        yield name, f"is not JSON: {error}"

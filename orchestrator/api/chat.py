"""Chat messages of a request: their checks, and the conversation that a chat template renders.

Knows the contract's messages; does not know templates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from orchestrator.tokenizer.chat_template import GIVEN, Conversation
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
    if chat.tools_json and not _is_list_of_objects(_parsed(chat.tools_json)):
        yield "chat.tools_json", "must be a JSON list of objects"
    if chat.template_kwargs_json:
        variables = _parsed(chat.template_kwargs_json)
        if not isinstance(variables, dict):
            yield "chat.template_kwargs_json", "must be a JSON object"
        elif taken := sorted(GIVEN & variables.keys()):
            yield "chat.template_kwargs_json", f"cannot set {taken[0]}"
    if chat.continue_final_message:
        if chat.add_generation_prompt:
            yield "chat.continue_final_message", "not possible with add_generation_prompt"
        if chat.messages and not chat.messages[-1].content:
            yield "chat.continue_final_message", "the last message has no content to continue"


def conversation(chat: generation_pb2.ChatMessages) -> Conversation:
    """A conversation without problems, as templates expect it."""
    return Conversation(
        [_message(message) for message in chat.messages],
        _parsed(chat.tools_json) if chat.tools_json else (),
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message,
        chat.continue_final_message,
        _parsed(chat.template_kwargs_json) if chat.template_kwargs_json else {},
    )


def _message_problems(message: generation_pb2.ChatMessage) -> Iterator[tuple[str, str]]:
    if not 1 <= len(message.role) <= MAX_ROLE_CHARACTERS:
        yield "role", f"must have 1 to {MAX_ROLE_CHARACTERS} characters"
    for index, call in enumerate(message.tool_calls):
        if not call.name:
            yield f"tool_calls[{index}].name", "must not be empty"
        if not isinstance(_parsed(call.arguments_json or "{}"), dict):
            yield f"tool_calls[{index}].arguments_json", "must be a JSON object"


def _message(message: generation_pb2.ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        if not message.content:
            del found["content"]
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                # An object and not its text: templates write it as JSON themselves.
                "function": {"name": call.name, "arguments": _parsed(call.arguments_json or "{}")},
            }
            for call in message.tool_calls
        ]
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        # Templates use any of these names.
        found["reasoning"] = found["reasoning_content"] = found["thinking"] = message.reasoning
    return found


def _parsed(text: str) -> Any:
    """The value in a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)

"""Bodies -> the fields of GenerateRequest. Knows both contracts; does not know connections and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from gateway import structure
from gateway.bodies import (
    ChatBody,
    Choices,
    CompletionBody,
    DetokenizeBody,
    Generation,
    Message,
    TokenizeBody,
    ToolCall,
)
from gateway.errors import HttpError
from gateway.responses_body import ResponsesBody, ResponsesChat, chat_of
from gateway.structure import Tool
from specdec.core.errors import InvalidArgument
from specdec.core.sequence import Method, Priority
from specdec.transport.wire import write_method

_COMPLETION_TOKENS = 16
"""Of a completion that names no number, as with OpenAI."""

_MAX_CALLS = 16
"""Of one answer, where calls are forced."""

_SAME = (
    *("top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty", "min_tokens", "stop"),
    *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens"),
    *("truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words", "cache_salt", "num_draft_tokens"),
    "n",
)
_LOWEST_TEMPERATURE = 1e-3

_NAMES = {
    "adapter": "model",
    "text": "prompt",
    "token_ids": "prompt",
    "chat": "messages",
    "chat.tools_json": "tools",
    "chat.template_kwargs_json": "chat_template_kwargs",
    "regex": "structured_outputs.regex",
    "choices": "structured_outputs.choice",
    "grammar": "structured_outputs.grammar",
}
"""Fields of the orchestrators' contract, and what callers name them."""
_IN_CALL = re.compile(r"(?<=tool_calls\[)(\d+\])\.(\w+?)(_json)?$")
_BEHIND_FIELD = re.compile(r"[.\[].*")
_IN_WORDS = re.compile(r"(?<=not possible with )\w+$|(?<=must be at most )max_tokens\b")
"""Further fields that a problem names."""


def of_completion(body: CompletionBody) -> list[dict[str, Any]]:
    """One request per prompt."""
    _check_stream(body)
    fields = _common(body) | structure.grammar_of_outputs(body.structured_outputs)
    fields["max_tokens"] = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_tokens == 0 and not body.echo:
        raise HttpError(400, "max_tokens: must be at least 1 without echo", param="max_tokens")
    # The prompt alone: the target makes one token all the same, which is left out of the answer.
    fields["max_tokens"] = max(1, fields["max_tokens"])
    fields["logprobs"] = body.num_top_logprobs
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    fields["echo"] = bool(body.echo or body.return_token_ids)
    return [{**fields, **prompt} for prompt in _prompts(body.prompt)]


def of_chat(body: ChatBody) -> dict[str, Any]:
    _check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise HttpError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
    if body.max_tokens == 0:
        raise HttpError(400, "max_tokens: must be at least 1", param="max_tokens")
    fields = _common(body)
    fields["max_tokens"] = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    fields["logprobs"] = body.num_top_logprobs
    fields["echo"] = bool(body.return_token_ids)
    tools = None if body.tool_choice == "none" else body.tools
    fields["chat"] = _conversation(body, tools, _variables(body))
    forced: dict[str, Any] = {}
    if tools:
        max_calls = 1 if body.parallel_tool_calls is False else _MAX_CALLS
        forced = structure.grammar_of_tools(tools, body.tool_choice or "auto", max_calls)
    elif body.tool_choice not in (None, "none", "auto"):
        raise HttpError(400, "tool_choice: needs tools", param="tool_choice")
    grammars = {
        "response_format": structure.grammar_of_format(body.response_format),
        "tool_choice": forced,
        "structured_outputs": structure.grammar_of_outputs(body.structured_outputs),
    }
    return fields | structure.only_grammar({body.NAMES.get(name, name): form for name, form in grammars.items()})


def of_responses(body: ResponsesBody) -> tuple[ResponsesChat, dict[str, Any]]:
    """The chat that it stands for, and the fields of its request."""
    chat = chat_of(body)
    return chat, of_chat(chat)


def of_tokenize(body: TokenizeBody) -> dict[str, Any]:
    """The fields of TokenizeRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "prompt: one of prompt and messages is required", param="prompt")
    fields: dict[str, Any] = {"add_special_tokens": body.add_special_tokens}
    if body.messages is None:
        return {**fields, "text": body.prompt}
    return {**fields, "chat": _conversation(body, body.tools, body.chat_template_kwargs)}


@contextmanager
def names_of(body: Generation | TokenizeBody | DetokenizeBody) -> Iterator[None]:
    """Errors of the orchestrators name the fields of ``body``, which the caller knows."""
    try:
        yield
    except InvalidArgument as error:
        in_words = partial(_IN_WORDS.sub, lambda match: _name(match[0], body))
        raise InvalidArgument([(_name(name, body), in_words(what)) for name, what in error.violations]) from error


def _name(name: str, body: Generation | TokenizeBody | DetokenizeBody) -> str:
    name = _chat_name(name, body)
    names = body.NAMES if isinstance(body, Generation) else {}
    return names.get(_BEHIND_FIELD.sub("", name), name)


def _chat_name(name: str, body: Generation | TokenizeBody | DetokenizeBody) -> str:
    if isinstance(body, DetokenizeBody) and name == "token_ids":
        return "tokens"
    if isinstance(body, Generation) and name == "json_schema":
        if body.structured_outputs is not None:
            return f"structured_outputs.{'json_object' if body.structured_outputs.json_object else 'json'}"
        form = body.response_format if isinstance(body, ChatBody) else None
        return "tools" if form is None or form.type == "text" else "response_format"
    if isinstance(body, ChatBody) and name == "max_tokens" and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    if isinstance(body, CompletionBody) and name == "prompt_logprobs" and body.prompt_logprobs is None:
        return "logprobs"  # with echo, those of the prompt
    return _NAMES.get(name) or _IN_CALL.sub(r"\1.function.\2", name.removeprefix("chat."))


def _variables(body: ChatBody) -> dict[str, Any]:
    """Further variables of the template."""
    effort: dict[str, Any] = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    if body.reasoning_effort == "none":
        effort["enable_thinking"] = False
    return effort | (body.chat_template_kwargs or {})


def _conversation(
    body: ChatBody | TokenizeBody, tools: Sequence[Tool] | None, variables: dict[str, Any] | None
) -> dict[str, Any]:
    """The fields of ChatMessages."""
    return {
        "messages": [_message(message) for message in body.messages or ()],
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "template_kwargs_json": json.dumps(variables) if variables else None,
        "tools_json": json.dumps([tool.model_dump(exclude_none=True) for tool in tools]) if tools else None,
    }


def _message(message: Message) -> dict[str, Any]:
    parts = message.content if isinstance(message.content, list) else []
    return {
        "role": message.role,
        "content": message.content if isinstance(message.content, str) else None,
        "content_parts": [part.text for part in parts],
        "name": message.name,
        "tool_calls": [_call(call) for call in message.tool_calls or ()],
        "tool_call_id": message.tool_call_id,
        "reasoning": message.reasoning,
    }


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call.id, "name": call.function.name, "arguments_json": text}


def _common(body: Choices) -> dict[str, Any]:
    fields = {name: getattr(body, name) for name in _SAME}
    if body.temperature is not None:
        # Clients send a tiny temperature where they mean none.
        fields["temperature"] = 0.0 if 0 <= body.temperature < _LOWEST_TEMPERATURE else body.temperature
    if body.top_k is not None:
        fields["top_k"] = max(0, body.top_k)  # -1: off
    if body.seed is not None:
        fields["seed"] = body.seed % (1 << 64)
    if body.logit_bias:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in body.logit_bias.items()}
    if body.verification is not None:
        fields["verification"] = write_method(Method(body.verification))
    if body.priority is not None:
        fields["priority"] = _priority(body.priority)
    if body.return_origins:
        fields["return_rounds"] = True
    if body.prediction is not None:
        fields["prediction"] = body.prediction.content
    return {name: value for name, value in fields.items() if value is not None}


def _priority(value: int | str) -> Priority:
    """A number is vLLM's: the lower one comes first, and 0 is usual."""
    if isinstance(value, str):
        return Priority[value.upper()]
    return Priority.INTERACTIVE if value < 0 else Priority.BATCH if value else Priority.STANDARD


def _check_stream(body: Choices) -> None:
    options = body.stream_options
    if options is not None and (options.include_usage or options.continuous_usage_stats) and not body.stream:
        raise HttpError(400, "stream_options: needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise HttpError(400, "prompt_logprobs: not possible with stream", param="prompt_logprobs")


def _prompts(prompt: Any) -> list[dict[str, Any]]:
    prompts = prompt if isinstance(prompt, list) and isinstance(prompt[0], (str, list)) else [prompt]
    return [{"text": item} if isinstance(item, str) else {"token_ids": {"token_ids": item}} for item in prompts]

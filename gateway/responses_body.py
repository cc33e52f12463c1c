"""The body of /v1/responses, and the chat that it stands for. Knows both shapes; does not know answers.

Nothing is stored here: a conversation comes whole, as items, and what would refer to stored ones is refused by name.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from gateway.bodies import ChatBody, Content, Count, FunctionCall, Generation, Message, TextPart, ToolCall, text_kind
from gateway.parsing import Few, HistoryBody, StrictBody
from gateway.structure import Choice, Function, JsonSchema, NamedChoice, NamedFunction, ResponseFormat, Tool

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = r"^(message\.(output_text\.logprobs|input_image\.image_url)|reasoning\.\w+|\w+_call(_output)?\.[\w.]+)$"
"""All but the first are of what does not happen here."""
_NOT_STORED = "not supported: nothing is stored here; send the items themselves in input, as with store false"


class MessageItem(HistoryBody):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(HistoryBody):
    """A call that a model wrote."""

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class CallOutputItem(HistoryBody):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningPart(HistoryBody):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(HistoryBody):
    """``summary`` counts where there is no content."""

    type: Literal["reasoning"]
    content: Few[ReasoningPart] | None = None
    summary: Few[ReasoningPart] | None = None


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _known_item(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value.get("type") or "message"
    if kind not in _ITEMS:
        what = _NOT_STORED if kind == "item_reference" else f"not supported; {', '.join(_ITEMS)} are"
        raise ValueError(f"{str(kind)[:64]}: {what}")
    return {**value, "type": kind}


AnyItem = MessageItem | CallItem | CallOutputItem | ReasoningItem
Item = Annotated[AnyItem, Field(discriminator="type"), BeforeValidator(_known_item)]


class FunctionTool(Function):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type", "function") != "function":
            raise ValueError(f"{str(value['type'])[:64]}: not supported; functions alone are")
        return value


class NamedTool(StrictBody):
    type: Literal["function"]
    name: str


class TextFormat(JsonSchema):
    """The fields of a schema are those of the type json_schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextSettings(StrictBody):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="no effect")


class ReasoningSettings(StrictBody):
    effort: str | None = Field(None, description="a variable of the template; none: enable_thinking is false")
    summary: str | None = Field(None, description="if set, the reasoning is given as summary in place of content")


class ResponsesBody(Generation):
    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[Few[Item], Field(min_length=1), Tag("parts")],
        Discriminator(text_kind),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 32)] | None = None
    tools: Annotated[Few[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: Few[Annotated[str, Field(pattern=_INCLUDED)]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None

    # Accepted, and without effect.
    stream_options: dict[Literal["include_obfuscation"], bool] | None = None
    background: Literal[False] | None = None
    max_tool_calls: Count | None = Field(None, description="of tools that a server runs")
    prompt_cache_retention: str | None = None

    UNSUPPORTED: ClassVar[dict[str, str]] = {
        "previous_response_id": "nothing is stored here; send the conversation in input",
        "conversation": "nothing is stored here; send the conversation in input",
        "prompt": "nothing is stored here; use instructions and input",
        "messages": "use input",
        "max_tokens": "use max_output_tokens",
        "response_format": "use text.format",
    }


class ResponsesChat(ChatBody):
    """The chat that a body of /v1/responses stands for."""

    NAMES: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }


def chat_of(body: ResponsesBody) -> ResponsesChat:
    has_logprobs = _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    # Of the fields of both bodies, the values are checked.
    return ResponsesChat.model_construct(
        **{name: getattr(body, name) for name in Generation.model_fields},
        messages=_messages(body),
        max_tokens=body.max_output_tokens,
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=_response_format(body.text.format if body.text else None),
        tools=[Tool(function=tool) for tool in body.tools or ()],
        tool_choice=_choice(body.tool_choice),
    )


def _response_format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    return ResponseFormat(type=form.type, json_schema=form if form.type == "json_schema" else None)


def _choice(choice: Choice | NamedTool | None) -> Choice | None:
    if isinstance(choice, NamedTool):
        return NamedChoice(type="function", function=NamedFunction(name=choice.name))
    return choice


def _messages(body: ResponsesBody) -> list[Message]:
    """What a model wrote before it got an answer is one message: its reasoning, text and calls."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    for is_of_model, group in groupby(body.input, _is_of_model):
        items = list(group)
        messages += [_turn(items)] if is_of_model else map(_message, items)
    return messages


def _is_of_model(item: AnyItem) -> bool:
    return item.role == "assistant" if isinstance(item, MessageItem) else not isinstance(item, CallOutputItem)


def _message(item: AnyItem) -> Message:
    if isinstance(item, MessageItem):
        return Message(role=item.role, content=item.content)
    assert isinstance(item, CallOutputItem)
    return Message(role="tool", content=item.output, tool_call_id=item.call_id)


def _turn(items: list[AnyItem]) -> Message:
    texts = [item.content for item in items if isinstance(item, MessageItem)]
    parts = [part for text in texts for part in ([TextPart(text=text)] if isinstance(text, str) else text)]
    calls = [
        ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
        for item in items
        if isinstance(item, CallItem)
    ]
    thoughts = [item.content or item.summary or () for item in items if isinstance(item, ReasoningItem)]
    reasoning = "\n".join(part.text for thought in thoughts for part in thought)
    content = texts[0] if len(texts) == 1 else parts or None
    # Together they may be more than a list of one body may have.
    return Message.model_construct(role="assistant", content=content, tool_calls=calls, reasoning=reasoning or None)

"""The body of /v1/responses, and the chat that it stands for. Knows both shapes; does not know answers.

Nothing is stored here: a conversation comes whole, as items, and what would refer to stored ones is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from gateway.bodies import ChatBody, Content, Count, FunctionCall, Generation, Message, ToolCall, text_kind
from gateway.parsing import Few, HistoryBody, StrictBody
from gateway.structure import Choice, Function, JsonSchema, NamedChoice, NamedFunction, ResponseFormat, Tool

LOGPROBS = "message.output_text.logprobs"
_NOT_STORED = "not supported: nothing is stored here; send the items themselves in input, as with store false"


class MessageItem(HistoryBody):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(HistoryBody):
    """A call that a model wrote."""

    type: Literal["function_call"]
    call_id: str
    name: str
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


def _item_kind(value: Any) -> str | None:
    kind = (value.get("type") or "message") if isinstance(value, dict) else None
    return kind if kind in _ITEMS else None


def _known_item(value: Any) -> Any:
    if isinstance(value, dict) and _item_kind(value) is None:
        kind = str(value["type"])[:64]
        what = _NOT_STORED if kind == "item_reference" else f"not supported; {', '.join(_ITEMS)} are"
        raise ValueError(f"{kind}: {what}")
    return value


Item = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("message")]
        | Annotated[CallItem, Tag("function_call")]
        | Annotated[CallOutputItem, Tag("function_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")],
        Discriminator(_item_kind, custom_error_type="item", custom_error_message="not an item"),
    ],
    BeforeValidator(_known_item),
]


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


class TextFormat(StrictBody):
    """``name``, ``description``, ``schema`` and ``strict``: of the type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _together(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("a schema goes with the type json_schema")
        return self


class TextSettings(StrictBody):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, description="no effect")


class ReasoningSettings(StrictBody):
    effort: str | None = Field(None, description="a variable of the template; none: enable_thinking is false")
    summary: str | None = Field(None, description="if set, the reasoning is given as summary in place of content")
    generate_summary: str | None = Field(None, description="the older name of summary")


class ResponsesStreamOptions(StrictBody):
    include_obfuscation: bool | None = Field(None, description="no effect")


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
    include: (
        Few[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "message.input_image.image_url",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = Field(None, description=f"all but {LOGPROBS} are of what is not supported")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None
    stream_options: ResponsesStreamOptions | None = None

    # Accepted, and without effect.
    background: Literal[False] | None = None
    max_tool_calls: Count | None = Field(None, description="of tools that a server runs")
    prompt_cache_retention: str | None = None

    UNSUPPORTED: ClassVar[dict[str, str]] = {
        "previous_response_id": "nothing is stored here; send the conversation in input",
        "conversation": "nothing is stored here; send the conversation in input",
        "prompt": "nothing is stored here; use instructions and input",
        "messages": "use input",
        "max_tokens": "use max_output_tokens",
        "max_completion_tokens": "use max_output_tokens",
        "response_format": "use text.format",
        "reasoning_effort": "use reasoning.effort",
        "functions": "use tools",
    }

    @field_validator("background", mode="before")
    @classmethod
    def _in_foreground(cls, value: Any) -> Any:
        if value is True:
            raise ValueError("not supported: nothing is stored here; use stream")
        return value


class ResponsesChat(ChatBody):
    """The chat that a body of /v1/responses stands for."""

    NAMES: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }


def chat_of(body: ResponsesBody) -> ResponsesChat:
    form = body.text.format if body.text else None
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    choice: Choice | None = None
    if isinstance(body.tool_choice, NamedTool):
        choice = NamedChoice(type="function", function=NamedFunction(name=body.tool_choice.name))
    else:
        choice = body.tool_choice
    # Of the fields of both bodies, the values are checked.
    return ResponsesChat.model_construct(
        **{name: getattr(body, name) for name in Generation.model_fields},
        messages=_messages(body),
        max_tokens=body.max_output_tokens,
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=_response_format(form) if form else None,
        tools=[Tool(function=tool) for tool in body.tools or ()] or None,
        tool_choice=choice,
    )


def _response_format(form: TextFormat) -> ResponseFormat:
    schema = JsonSchema(name=form.name, schema=form.schema_) if form.schema_ is not None else None
    return ResponseFormat(type=form.type, json_schema=schema)


def _messages(body: ResponsesBody) -> list[Message]:
    """What a model wrote before it got an answer is one message: its reasoning, text and calls."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    items: Iterable[Item] = (
        [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    for item in items:
        if isinstance(item, CallOutputItem):
            messages.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(Message(role=item.role, content=item.content))
        else:
            if not messages or _begins_message(item, messages[-1]):
                messages.append(Message(role="assistant"))
            _add(item, messages[-1])
    return messages


def _begins_message(item: MessageItem | CallItem | ReasoningItem, last: Message) -> bool:
    if last.role != "assistant" or isinstance(item, CallItem):
        return last.role != "assistant"
    return last.content is not None or bool(last.tool_calls)


def _add(item: MessageItem | CallItem | ReasoningItem, message: Message) -> None:
    """``message``: an assistant's."""
    if isinstance(item, CallItem):
        call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
        message.tool_calls = [*(message.tool_calls or ()), call]
    elif isinstance(item, MessageItem):
        message.content = item.content
    else:
        texts = [part.text for part in item.content or item.summary or ()]
        message.reasoning = "\n".join([message.reasoning, *texts] if message.reasoning else texts) or None

"""The bodies of requests, as OpenAI and vLLM name their fields. Knows types; does not know what a field does.

A field that is not here is refused, and so is one that the server does not support: with its name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from gateway.parsing import EMPTY, Few, HistoryBody, StrictBody
from gateway.structure import Choice, ResponseFormat, StructuredOutputs, Tool
from specdec.transport.sampling_wire import MAX_BIASES

Count = Annotated[int, Field(ge=0, lt=1 << 32)]
Ids = Annotated[list[Count], Field(max_length=1 << 20, fail_fast=True)]


class StreamOptions(StrictBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Prediction(StrictBody):
    type: Literal["content"]
    content: str


class Generation(StrictBody):
    """What all requests for text have in common."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: str | Few[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=1 << 32)] | None = None
    allowed_token_ids: Annotated[Ids, Field(min_length=1)] | None = None
    bad_words: Few[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | Literal["interactive", "standard", "batch"] | None = (
        Field(None, description="when it is computed; a number, as with vLLM: below 0 interactive, above 0 batch")
    )
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None

    num_draft_tokens: Count | None = Field(None, description="draft tokens per round; 0: none; null: adapted")
    verification: Literal["coupled", "token", "block"] | None = Field(None, description="how drafts are verified")
    prediction: Prediction | None = None

    # Accepted, and without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    parallel_tool_calls: bool | None = None

    NAMES: ClassVar[dict[str, str]] = {}
    """Fields that the caller knows by other names, and these."""

    @field_validator("stop")
    @classmethod
    def _as_list(cls, value: str | list[str] | None) -> list[str] | None:
        return [value] if value and isinstance(value, str) else value or None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise ValueError(f"at most {MAX_BIASES} tokens, not {len(value)}")
        for key in value if isinstance(value, dict) else ():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"{key!r} is not a token id")
        return value


class Choices(Generation):
    """What completions and chat have in common."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    max_tokens: Count | None = None
    prompt_logprobs: Count | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_origins: bool | None = Field(None, description="with each chunk, where its tokens came from, and its rounds")
    verbosity: str | None = Field(None, description="no effect")

    UNSUPPORTED: ClassVar[dict[str, str]] = {
        "best_of": "use n",
        "use_beam_search": "use n",
        "length_penalty": "use max_tokens",
        "guided_json": "use structured_outputs",
        "guided_regex": "use structured_outputs",
        "guided_choice": "use structured_outputs",
        "guided_grammar": "use structured_outputs",
        "prompt_embeds": "use prompt",
    }

    @classmethod
    def asks(cls, name: str, fields: dict[str, Any]) -> bool:
        neutral = {"best_of": fields.get("n") or 1, "use_beam_search": False, "length_penalty": 1}
        return super().asks(name, fields) and fields[name] != neutral.get(name)


class CompletionBody(Choices):
    prompt: str | Few[str] | Ids | Few[Ids]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    UNSUPPORTED: ClassVar[dict[str, str]] = {**Choices.UNSUPPORTED, "suffix": "put it into the prompt"}

    @property
    def num_top_logprobs(self) -> int | None:
        """Next to each token's logprob; None: no logprobs."""
        return self.logprobs

    @field_validator("prompt")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value == [] or (isinstance(value, list) and [] in value):
            raise ValueError("must not be empty")
        if isinstance(value, list) and isinstance(value[0], (str, list)) and len(value) > 64:
            raise ValueError(f"at most 64 prompts, not {len(value)}")
        return value


def _refused(value: Any) -> None:
    if value not in EMPTY:
        raise ValueError("not supported: text alone is")


def text_kind(value: Any) -> str:
    """The tag of what is a text or a list of parts."""
    return "parts" if isinstance(value, list) else "text"


Unsupported = Annotated[None, BeforeValidator(_refused)]
"""What would be missing from the prompt."""


class TextPart(HistoryBody):
    type: Literal["text", "input_text", "output_text"] = "text"
    text: str


Content = Annotated[Annotated[str, Tag("text")] | Annotated[Few[TextPart], Tag("parts")], Discriminator(text_kind)]


class FunctionCall(HistoryBody):
    """``arguments``: as a model may have written them, which is not always JSON."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(HistoryBody):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(HistoryBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Few[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = Field(None, description="what a model thought; reasoning_content is the same")
    audio: Unsupported = None
    function_call: Unsupported = None
    refusal: Unsupported = None

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        if isinstance(value, dict) and not value.get("reasoning") and value.get("reasoning_content"):
            return {**value, "reasoning": value["reasoning_content"]}
        return value


Tools = Annotated[Few[Tool], Field(max_length=128)]


class ChatBody(Choices):
    messages: Annotated[Few[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 32)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, description="a variable of the template; none: enable_thinking is false")
    include_reasoning: bool | None = Field(None, description="false: the answer has no reasoning in it")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    modalities: Few[Literal["text"]] | None = None

    UNSUPPORTED: ClassVar[dict[str, str]] = {
        **Choices.UNSUPPORTED,
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "text alone is supported",
        "chat_template": "the template is the server's",
    }

    @property
    def num_top_logprobs(self) -> int | None:
        """Next to each token's logprob; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(StrictBody):
    model: str | None = None
    prompt: str | None = None
    messages: Few[Message] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    model: str | None = None
    tokens: Ids

"""Checks of a request: every problem is reported at once, and nothing is ignored silently.

Knows what is wrong with a request; does not know how it is read (orchestrator.api.request_reader).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from orchestrator.api.bounds import MAX_PROMPT_LOGPROBS, MAX_SAMPLES, MAX_STOP_CHARACTERS
from orchestrator.api.chat import chat_problems
from orchestrator.api.prompts import Prompts
from orchestrator.request import Ids, Request
from specdec.core.errors import ContextExceeded
from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.core.rounds import CACHE_SALT, LOGPROBS, MAX_LOGPROBS, RESTRICTIONS, TRANSFORMS, ModelInfo
from specdec.core.sequence import Method
from specdec.transport.sampling_wire import sampling_problems
from specdec.transport.wire import read_method, read_priority
from specdec.v1 import generation_pb2

Problems = Iterator[tuple[str, str]]
"""(field, problem)."""

_UNKNOWN_FIELDS = 8

_LOGPROBS = ("logprobs", "prompt_logprobs")
_CHANGES_NOTHING = [("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1), ("min_tokens", 0)]
_FIELDS = {
    TRANSFORMS: ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens"),
    RESTRICTIONS: ("allowed_token_ids", "bad_words"),
    LOGPROBS: _LOGPROBS,
    CACHE_SALT: ("cache_salt",),
}
"""By capability of a target, the fields that need it. A grammar has further needs (orchestrator.api.grammars)."""


def problems_without_ids(
    message: generation_pb2.GenerateRequest,
    request: Request,
    target: ModelInfo,
    prompts: Prompts,
    methods: Collection[Method],
) -> Problems:
    """What is wrong whatever the ids are. ``request``: up to what is read of it. ``methods``: those allowed."""
    yield from unknown_problems(message)
    yield from _prompt_problems(message, prompts)
    yield from _sampling_problems(request, target)
    yield from _support_problems(message, target)
    yield from _adapter_problems(message, target)
    yield from _option_problems(message, request, methods)
    yield from _resume_problems(message, request)
    yield from _stop_problems(message, target, prompts)
    yield from _logprobs_problems(message)
    yield from _text_option_problems(message, prompts)


def tokens_left(num_prompt_ids: int, message: generation_pb2.GenerateRequest, target: ModelInfo) -> int:
    """The tokens that may be generated after so many. Raises ContextExceeded if the context has no room for them."""
    room = target.context_length - num_prompt_ids
    max_tokens = message.max_tokens if message.HasField("max_tokens") else room
    if max_tokens > room or room <= 0:
        num_new = max(max_tokens, 1)
        parts = f"{num_prompt_ids} in the prompt, {num_new} in the completion"
        raise context_exceeded(target.context_length, f"you requested {num_prompt_ids + num_new} tokens ({parts})")
    return max_tokens


def context_exceeded(context_length: int, requested: str) -> ContextExceeded:
    """In OpenAI's words, by which clients recognise that a conversation has to be shortened."""
    return ContextExceeded(
        f"This model's maximum context length is {context_length} tokens. However, {requested}. "
        "Please reduce the length of the prompt or of the completion."
    )


def foreign_ids(message: generation_pb2.GenerateRequest, target: ModelInfo) -> Problems:
    """Fields with ids outside the vocabulary. Looks at every id."""
    ids = message.token_ids.token_ids
    if ids and (largest := max(ids)) >= target.vocab_size:
        yield "token_ids", f"{largest} is outside the vocabulary of {target.vocab_size}"
    for index, received in message.resume.items():
        if received.token_ids and max(received.token_ids) >= target.vocab_size:
            yield f"resume[{index}]", f"has ids outside the vocabulary of {target.vocab_size}"


def length_problems(message: generation_pb2.GenerateRequest, prompt_ids: Ids, max_tokens: int) -> Problems:
    if not prompt_ids:
        yield message.WhichOneof("prompt") or "prompt", "has no tokens"
    size = len(prompt_ids) * (1 + message.prompt_logprobs)
    if message.HasField("prompt_logprobs") and size > MAX_PROMPT_LOGPROBS:
        yield "prompt_logprobs", f"at most {MAX_PROMPT_LOGPROBS} for a whole prompt, not {size}"
    if message.min_tokens > max_tokens:
        yield "min_tokens", f"must be at most max_tokens = {max_tokens}, not {message.min_tokens}"
    for index, received in message.resume.items():
        if len(received.token_ids) > max_tokens:
            yield f"resume[{index}]", f"has more than max_tokens = {max_tokens} ids"


def _option_problems(
    message: generation_pb2.GenerateRequest, request: Request, methods: Collection[Method]
) -> Problems:
    if not 1 <= (num_samples := request.output.num_samples) <= MAX_SAMPLES:
        yield "n", f"must be 1 to {MAX_SAMPLES}, not {num_samples}"
    if message.HasField("max_tokens") and message.max_tokens == 0:
        yield "max_tokens", "must be at least 1"
    if message.verification and read_method(message.verification) is None:
        yield "verification", f"unknown method {message.verification}"
    elif (method := request.drafting.method) not in methods:
        allowed = ", ".join(allowed_method.value for allowed_method in methods)
        yield "verification", f"{method.value} is not allowed at this server, only {allowed}"
    if read_priority(message.priority) is None:
        yield "priority", f"unknown priority {message.priority}"
    if message.num_draft_tokens > MAX_DRAFT_TOKENS:
        yield "num_draft_tokens", f"must be at most {MAX_DRAFT_TOKENS}, not {message.num_draft_tokens}"


def _resume_problems(message: generation_pb2.GenerateRequest, request: Request) -> Problems:
    num_samples, method = request.output.num_samples, request.drafting.method
    for index, received in message.resume.items():
        if index >= num_samples:
            yield f"resume[{index}]", f"is not one of {num_samples} samples"
        if received.token_ids and not request.keyed_by_token:
            # Which of them the client lacks depends on their text: to draw these again would change their distribution.
            yield f"resume[{index}]", f"an output under {method.value} verification is not resumed above temperature 0"
    if message.resume and not message.HasField("seed"):
        yield "seed", "is required to resume: the one that was returned at admission"


def _support_problems(message: generation_pb2.GenerateRequest, target: ModelInfo) -> Problems:
    changes = {field.name for field, value in message.ListFields() if (field.name, value) not in _CHANGES_NOTHING}
    for capability, names in _FIELDS.items():
        if capability not in target.capabilities:
            yield from ((name, "not supported by this target") for name in names if name in changes)


def _adapter_problems(message: generation_pb2.GenerateRequest, target: ModelInfo) -> Problems:
    if message.adapter and message.adapter not in target.adapters:
        available = f"there are {', '.join(target.adapters)}" if target.adapters else "this target has none"
        yield "adapter", f"no adapter has the name {message.adapter[:256]!r}; {available}"


def _sampling_problems(request: Request, target: ModelInfo) -> Problems:
    sampling = request.sampling
    # The stop tokens are checked under their own field name.
    yield from sampling_problems(dataclasses.replace(sampling, end_token_ids=()), target.vocab_size)
    if len(sampling.end_token_ids) >= target.vocab_size:
        yield "min_tokens", "every token is a stop token"
    if sampling.allowed_token_ids and set(sampling.allowed_token_ids) <= set(sampling.end_token_ids):
        yield "min_tokens", "every allowed token is a stop token"


def _logprobs_problems(message: generation_pb2.GenerateRequest) -> Problems:
    for name in _LOGPROBS:
        if (number := getattr(message, name)) > MAX_LOGPROBS:
            yield name, f"must be at most {MAX_LOGPROBS}, not {number}"


def _prompt_problems(message: generation_pb2.GenerateRequest, prompts: Prompts) -> Problems:
    if message.HasField("truncate_prompt_tokens") and not message.truncate_prompt_tokens:
        yield "truncate_prompt_tokens", "must be at least 1"
    elif message.WhichOneof("prompt") != "token_ids":
        yield from text_problems(message, prompts)
    elif message.HasField("add_special_tokens"):
        yield "add_special_tokens", "not possible with token_ids"
    elif not message.token_ids.token_ids:
        yield "token_ids", "must not be empty"


def text_problems(
    message: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, prompts: Prompts
) -> Problems:
    """For a text or a conversation that cannot be tokenized."""
    kind = message.WhichOneof("prompt")
    kinds = [field.name for field in message.DESCRIPTOR.oneofs_by_name["prompt"].fields]
    if kind is None:
        yield "prompt", f"one of {', '.join(kinds)} is required"
    elif prompts.tokenizer is None:
        yield kind, "this server has no tokenizer; send token_ids"
    elif kind == "chat" and prompts.template is None:
        yield "chat", "this model has no chat template"
    elif kind == "chat":
        yield from chat_problems(message.chat)
    elif not message.text:
        yield "text", "must not be empty"


def _text_option_problems(message: generation_pb2.GenerateRequest, prompts: Prompts) -> Problems:
    for name in ("bad_words", "prediction"):
        if getattr(message, name) and prompts.tokenizer is None:
            yield name, "this server has no tokenizer"
    for index, word in enumerate(message.bad_words):
        if not 1 <= len(word) <= MAX_STOP_CHARACTERS:
            yield f"bad_words[{index}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters"
    if message.prediction and message.HasField("num_draft_tokens"):
        yield "prediction", "not possible with num_draft_tokens"
    if message.prediction and read_method(message.verification) in (Method.TOKEN, Method.BLOCK):
        yield "prediction", "not possible with this verification"


def _stop_problems(message: generation_pb2.GenerateRequest, target: ModelInfo, prompts: Prompts) -> Problems:
    if message.stop and prompts.tokenizer is None:
        yield "stop", "this server has no tokenizer; use stop_token_ids"
    for index, stop in enumerate(message.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            yield f"stop[{index}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters"
    if message.stop_token_ids and (largest := max(message.stop_token_ids)) >= target.vocab_size:
        yield "stop_token_ids", f"{largest} is outside the vocabulary of {target.vocab_size}"


def unknown_problems(message: Message) -> list[tuple[str, str]]:
    """For fields of a later contract. They are refused because they would have no effect."""
    return [(name, f"unknown field {number}") for name, number in _unknown_fields(message)]


def _unknown_fields(message: Message, name: str = "field") -> Iterator[tuple[str, int]]:
    """The first unknown fields of each message: there may be millions, and one is enough to refuse."""
    unknown = UnknownFieldSet(message)
    for index in range(min(len(unknown), _UNKNOWN_FIELDS)):
        yield name, unknown[index].field_number
    for field, value in message.ListFields():
        if isinstance(value, Message):
            yield from _unknown_fields(value, field.name)
        elif field.name in ("messages", "tool_calls"):
            for index, inner in enumerate(value):
                yield from _unknown_fields(inner, f"{name}.{field.name}[{index}]")
        elif field.name == "resume":
            for index, received in value.items():
                yield from _unknown_fields(received, f"resume[{index}]")

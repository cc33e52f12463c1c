"""Checks of a request: every problem is reported at once, and nothing is ignored silently."""

from __future__ import annotations

import dataclasses
import secrets
from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from orchestrator.api import grammars
from orchestrator.api.bounds import (
    MAX_PROMPT_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_CHARACTERS,
    is_long,
    size_problems,
)
from orchestrator.api.chat import chat_problems
from orchestrator.api.prompts import Prompts
from orchestrator.request import Request
from orchestrator.tokenizer.defaults import Defaults
from specdec.core.errors import ContextExceeded, InvalidArgument
from specdec.core.rounds import CACHE_SALT, LOGPROBS, MAX_LOGPROBS, RESTRICTIONS, TRANSFORMS, ModelInfo
from specdec.core.sequence import Method, SamplingParams
from specdec.transport.sampling_wire import sampling_problems
from specdec.transport.wire import read_method
from specdec.v1 import generation_pb2

OWN_DEFAULTS = Defaults()
MAX_DRAFT_TOKENS = 64
_UNKNOWN_FIELDS = 8

_TRANSFORMS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens")
_RESTRICTIONS = ("allowed_token_ids", "bad_words")
_LOGPROBS = ("logprobs", "prompt_logprobs")


def requested_samples(message: generation_pb2.GenerateRequest) -> int:
    """Number of samples that a request occupies before it is read; 1 if its number is out of range."""
    return message.n if 1 <= message.n <= MAX_SAMPLES else 1


def check_request(
    message: generation_pb2.GenerateRequest,
    target: ModelInfo,
    prompts: Prompts,
    methods: Collection[Method] = tuple(Method),
    defaults: Defaults = OWN_DEFAULTS,
) -> None:
    """Refuse what can be refused in no time, before the request has a place: without the ids of a text, and without a
    look at each of very many ids. ``methods``: those allowed. ``defaults``: of absent fields.

    Raises InvalidArgument with all violations, or ContextExceeded. Sizes are checked before the rest is read.
    """
    if too_long := list(size_problems(message, target.context_length)):
        raise InvalidArgument(too_long)
    problems = unknown_problems(message)
    problems += _prompt_problems(message, prompts)
    problems += _sampling_problems(message, target, prompts, defaults)
    problems += _option_problems(message, methods)
    problems += _resume_problems(message, defaults)
    problems += _salt_problems(message.cache_salt.encode(), target)
    problems += _stop_problems(message, target, prompts)
    problems += _logprobs_problems(message, target)
    problems += _text_option_problems(message, prompts)
    problems += grammars.problems(message, target, prompts.tokenizer is not None)
    problems += [] if is_long(message) else _foreign_ids(message, target)
    if problems:
        raise InvalidArgument(problems)
    _check_room(prompts.fewest_ids(message), message, target, "" if message.HasField("token_ids") else "at least ")


def read_request(
    message: generation_pb2.GenerateRequest,
    target: ModelInfo,
    prompts: Prompts,
    num_draft_tokens: int | None,
    defaults: Defaults = OWN_DEFAULTS,
) -> Request:
    """The request, checked by ``check_request`` before, without its grammar. ``num_draft_tokens``: for requests that
    name none.

    Its time grows with the prompt and the ids to resume. Raises InvalidArgument with all violations, or
    ContextExceeded.
    """
    prompt_ids = prompts.ids(message, target.context_length)
    resume = {index: array("I", received.token_ids) for index, received in message.resume.items()}
    max_tokens = _check_room(len(prompt_ids), message, target)
    problems = list(_foreign_ids(message, target)) if is_long(message) else []
    problems += _length_problems(message, prompt_ids, max_tokens)
    bad_words = list(_bad_words(message, prompts))
    problems += [("bad_words", "has a text without tokens")] if not all(bad_words) else []
    if problems:
        raise InvalidArgument(problems)
    stop_token_ids = _stop_token_ids(message, target, prompts)
    return Request(
        prompt_ids,
        max_tokens,
        _sampling(message, stop_token_ids, defaults, bad_words),
        message.seed if message.HasField("seed") else secrets.randbits(64),
        message.n if message.HasField("n") else 1,
        tuple(message.stop),
        stop_token_ids,
        read_method(message.verification) or Method.COUPLED,
        message.num_draft_tokens if message.HasField("num_draft_tokens") else num_draft_tokens,
        resume,
        message.cache_salt.encode(),
        message.include_stop_str_in_output,
        message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        message.logprobs if message.HasField("logprobs") else None,
        message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        message.echo or message.HasField("prompt_logprobs"),
        message.return_rounds,
        prompts.encoded(message.prediction, False) if message.prediction else array("I"),
    )


def _check_room(
    num_prompt_ids: int, message: generation_pb2.GenerateRequest, target: ModelInfo, about: str = ""
) -> int:
    """The tokens that may be generated after so many. Raises ContextExceeded if the context has no room for them."""
    room = target.context_length - num_prompt_ids
    max_tokens = message.max_tokens if message.HasField("max_tokens") else room
    if max_tokens > room or room <= 0:
        raise ContextExceeded(
            f"{about}{num_prompt_ids} prompt tokens and max_tokens {max(max_tokens, 1)}"
            f" do not fit the context of {target.context_length}"
        )
    return max_tokens


def _foreign_ids(message: generation_pb2.GenerateRequest, target: ModelInfo) -> Iterator[tuple[str, str]]:
    """Fields with ids outside the vocabulary. Looks at every id."""
    ids = message.token_ids.token_ids
    if ids and (largest := max(ids)) >= target.vocab_size:
        yield "token_ids", f"{largest} is outside the vocabulary of {target.vocab_size}"
    for index, received in message.resume.items():
        if received.token_ids and max(received.token_ids) >= target.vocab_size:
            yield f"resume[{index}]", f"has ids outside the vocabulary of {target.vocab_size}"


def _length_problems(
    message: generation_pb2.GenerateRequest, prompt_ids: array[int], max_tokens: int
) -> Iterator[tuple[str, str]]:
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


def _option_problems(message: generation_pb2.GenerateRequest, methods: Collection[Method]) -> Iterator[tuple[str, str]]:
    num_samples = message.n if message.HasField("n") else 1
    if not 1 <= num_samples <= MAX_SAMPLES:
        yield "n", f"must be 1 to {MAX_SAMPLES}, not {num_samples}"
    if message.HasField("max_tokens") and message.max_tokens == 0:
        yield "max_tokens", "must be at least 1"
    known = read_method(message.verification)
    if message.verification and known is None:
        yield "verification", f"unknown method {message.verification}"
    elif known and known not in methods:
        allowed = ", ".join(each.value for each in methods)
        yield "verification", f"{known.value} is not allowed at this server, only {allowed}"
    if message.num_draft_tokens > MAX_DRAFT_TOKENS:
        yield "num_draft_tokens", f"must be at most {MAX_DRAFT_TOKENS}, not {message.num_draft_tokens}"


def _resume_problems(message: generation_pb2.GenerateRequest, defaults: Defaults) -> Iterator[tuple[str, str]]:
    num_samples = message.n if message.HasField("n") else 1
    temperature = message.temperature if message.HasField("temperature") else defaults.temperature
    method = read_method(message.verification) or Method.COUPLED
    keyed = method is Method.COUPLED or temperature == 0
    for index, received in message.resume.items():
        if index >= num_samples:
            yield f"resume[{index}]", f"is not one of {num_samples} samples"
        if received.token_ids and not keyed:
            # Which of them the client lacks depends on their text: to draw these anew would change their distribution.
            yield f"resume[{index}]", f"an output under {method.value} verification is not resumed above temperature 0"
    if message.resume and not message.HasField("seed"):
        yield "seed", "is required to resume: the one that was returned at admission"


def _stop_token_ids(message: generation_pb2.GenerateRequest, target: ModelInfo, prompts: Prompts) -> frozenset[int]:
    # A special token has no text in an output, so that its string would never be found there.
    special = {prompts.special_ids[stop] for stop in message.stop if stop in prompts.special_ids}
    drawn = {token_id for token_id in special if token_id < target.vocab_size}
    ends = frozenset(() if message.ignore_eos else target.eos_token_ids)
    return frozenset(message.stop_token_ids) | ends | drawn


def _bad_words(message: generation_pb2.GenerateRequest, prompts: Prompts) -> Iterator[tuple[int, ...]]:
    """The tokens of each text, at the beginning of a text and after a space."""
    texts = [text for word in message.bad_words for text in (word, f" {word}")]
    yield from dict.fromkeys(tuple(prompts.encoded(text, False)) for text in texts)


def _sampling(
    message: generation_pb2.GenerateRequest,
    stop_token_ids: frozenset[int],
    defaults: Defaults,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> SamplingParams:
    def given(name: str) -> Any:
        return getattr(message if message.HasField(name) else defaults, name)

    return SamplingParams(
        given("temperature"),
        given("top_k"),
        given("top_p"),
        given("min_p"),
        given("repetition_penalty"),
        message.presence_penalty,
        message.frequency_penalty,
        tuple(sorted(message.logit_bias.items())),
        message.min_tokens,
        tuple(sorted(stop_token_ids)) if message.min_tokens else (),
        tuple(sorted(set(message.allowed_token_ids))),
        tuple(bad_words),
    )


def _sampling_problems(
    message: generation_pb2.GenerateRequest, target: ModelInfo, prompts: Prompts, defaults: Defaults
) -> list[tuple[str, str]]:
    sampling = _sampling(message, _stop_token_ids(message, target, prompts), defaults)
    # The stop tokens are checked under their own field name.
    of_client = dataclasses.replace(sampling, end_token_ids=())
    problems = sampling_problems(of_client, target.vocab_size)
    for needed, capability, names in (
        (sampling.transforms, TRANSFORMS, _TRANSFORMS),
        (bool(message.allowed_token_ids or message.bad_words), RESTRICTIONS, _RESTRICTIONS),
    ):
        if needed and capability not in target.capabilities:
            problems += [(name, "not supported by this target") for name in names if _present(message, name)]
    if len(sampling.end_token_ids) >= target.vocab_size:
        problems.append(("min_tokens", "every token is a stop token"))
    if sampling.allowed_token_ids and set(sampling.allowed_token_ids) <= set(sampling.end_token_ids):
        problems.append(("min_tokens", "every allowed token is a stop token"))
    return problems


def _prompt_problems(message: generation_pb2.GenerateRequest, prompts: Prompts) -> list[tuple[str, str]]:
    if message.HasField("truncate_prompt_tokens") and not message.truncate_prompt_tokens:
        return [("truncate_prompt_tokens", "must be at least 1")]
    if message.WhichOneof("prompt") != "token_ids":
        return list(text_problems(message, prompts))
    if message.HasField("add_special_tokens"):
        return [("add_special_tokens", "not possible with token_ids")]
    return [] if message.token_ids.token_ids else [("token_ids", "must not be empty")]


def text_problems(
    message: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, prompts: Prompts
) -> Iterator[tuple[str, str]]:
    """(field, problem) for a text or a conversation that cannot be tokenized."""
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


def _logprobs_problems(message: generation_pb2.GenerateRequest, target: ModelInfo) -> Iterator[tuple[str, str]]:
    for name in _LOGPROBS:
        if not message.HasField(name):
            continue
        if (number := getattr(message, name)) > MAX_LOGPROBS:
            yield name, f"must be at most {MAX_LOGPROBS}, not {number}"
        elif LOGPROBS not in target.capabilities:
            yield name, "not supported by this target"


def _text_option_problems(message: generation_pb2.GenerateRequest, prompts: Prompts) -> Iterator[tuple[str, str]]:
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


def _salt_problems(salt: bytes, target: ModelInfo) -> list[tuple[str, str]]:
    if salt and CACHE_SALT not in target.capabilities:
        return [("cache_salt", "not supported by this target")]
    return []


def _stop_problems(
    message: generation_pb2.GenerateRequest, target: ModelInfo, prompts: Prompts
) -> list[tuple[str, str]]:
    problems = []
    if message.stop and prompts.tokenizer is None:
        problems.append(("stop", "this server has no tokenizer; use stop_token_ids"))
    for index, stop in enumerate(message.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            problems.append((f"stop[{index}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters"))
    for token_id in message.stop_token_ids:
        if token_id >= target.vocab_size:
            problems.append(("stop_token_ids", f"{token_id} is outside the vocabulary of {target.vocab_size}"))
            break
    return problems


def _present(message: Message, name: str) -> bool:
    return any(field.name == name for field, _ in message.ListFields())


def unknown_problems(message: Message) -> list[tuple[str, str]]:
    """(field, problem) for fields of a later contract. They are refused because they would have no effect."""
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
            for index, each in enumerate(value):
                yield from _unknown_fields(each, f"{name}.{field.name}[{index}]")
        elif field.name == "resume":
            for index, received in value.items():
                yield from _unknown_fields(received, f"resume[{index}]")

"""Checks of a request: every problem is reported at once, and nothing is ignored silently."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Collection, Iterator

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from tokenizers import Tokenizer

from orchestrator.api.bounds import MAX_SAMPLES, MAX_STOP_CHARACTERS, size_problems
from orchestrator.request import Request
from specdec.core.errors import ContextExceeded, InvalidArgument
from specdec.core.rounds import CACHE_SALT, TRANSFORMS, ModelInfo
from specdec.core.sequence import Method, SamplingParams
from specdec.transport.sampling_wire import sampling_problems
from specdec.transport.wire import read_method
from specdec.v1 import common_pb2, generation_pb2

MAX_DRAFT_TOKENS = 64
_UNKNOWN_FIELDS = 8

_UNSUPPORTED = (
    "chat",
    "logprobs",
    "grammar",
)
_TRANSFORMS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens")


def requested_samples(message: generation_pb2.GenerateRequest) -> int:
    """Number of samples that a request occupies before it is read; 1 if its number is out of range."""
    return message.n if 1 <= message.n <= MAX_SAMPLES else 1


def read_request(
    message: generation_pb2.GenerateRequest,
    target: ModelInfo,
    tokenizer: Tokenizer | None,
    num_draft_tokens: int | None,
    methods: Collection[Method] = tuple(Method),
) -> Request:
    """The checked request. ``num_draft_tokens``: the default for requests that name none. ``methods``: those allowed.

    Raises InvalidArgument with all violations, or ContextExceeded. Sizes are checked before the rest is read.
    """
    if too_long := list(size_problems(message, target.context_length)):
        raise InvalidArgument(too_long)
    if (length := len(message.token_ids.token_ids)) > target.context_length:
        raise ContextExceeded(f"{length} prompt tokens do not fit the context of {target.context_length}")
    problems = [(name, "not supported") for name in _UNSUPPORTED if _present(message, name)]
    problems += [(name, f"unknown field {number}") for name, number in _unknown_fields(message)]
    if not _present(message, "chat"):
        problems += _prompt_problems(message, target, tokenizer)
    stop_token_ids = frozenset(message.stop_token_ids) | frozenset(target.eos_token_ids)
    sampling = _sampling(message, stop_token_ids)
    problems += _sampling_problems(message, sampling, target)
    num_samples = message.n if message.HasField("n") else 1
    if not 1 <= num_samples <= MAX_SAMPLES:
        problems.append(("n", f"must be 1 to {MAX_SAMPLES}, not {num_samples}"))
    if message.HasField("max_tokens") and message.max_tokens == 0:
        problems.append(("max_tokens", "must be at least 1"))
    problems += _salt_problems(message.cache_salt.encode(), target)
    problems += _stop_problems(message, target, tokenizer)
    method = Method.COUPLED
    if message.verification != common_pb2.VERIFICATION_METHOD_UNSPECIFIED:
        known = read_method(message.verification)
        if known is None:
            problems.append(("verification", f"unknown method {message.verification}"))
        elif known not in methods:
            allowed = ", ".join(each.value for each in methods)
            problems.append(("verification", f"{known.value} is not allowed at this server, only {allowed}"))
        method = known or method
    if message.HasField("num_draft_tokens"):
        num_draft_tokens = message.num_draft_tokens
        if message.num_draft_tokens > MAX_DRAFT_TOKENS:
            problems.append(("num_draft_tokens", f"must be at most {MAX_DRAFT_TOKENS}, not {num_draft_tokens}"))
    for index, received in message.resume.items():
        if index >= num_samples:
            problems.append((f"resume[{index}]", f"is not one of {num_samples} samples"))
        if received.token_ids and max(received.token_ids) >= target.vocab_size:
            problems.append((f"resume[{index}]", f"has ids outside the vocabulary of {target.vocab_size}"))
    if message.resume and not message.HasField("seed"):
        problems.append(("seed", "is required to resume: the one that was returned at admission"))
    if problems:
        raise InvalidArgument(problems)

    prompt_ids = _prompt_ids(message, tokenizer)
    if not prompt_ids:
        raise InvalidArgument([("text", "has no tokens")])
    room = target.context_length - len(prompt_ids)
    max_tokens = message.max_tokens if message.HasField("max_tokens") else room
    if max_tokens > room or room <= 0:
        raise ContextExceeded(
            f"{len(prompt_ids)} prompt tokens and max_tokens {max(max_tokens, 1)}"
            f" do not fit the context of {target.context_length}"
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidArgument([("min_tokens", f"must be at most max_tokens = {max_tokens}, not {sampling.min_tokens}")])
    for index, received in message.resume.items():
        if len(received.token_ids) > max_tokens:
            raise InvalidArgument([(f"resume[{index}]", f"has more than max_tokens = {max_tokens} ids")])
    return Request(
        prompt_ids,
        max_tokens,
        sampling,
        message.seed if message.HasField("seed") else secrets.randbits(64),
        num_samples,
        tuple(message.stop),
        stop_token_ids,
        method,
        num_draft_tokens,
        {index: tuple(received.token_ids) for index, received in message.resume.items()},
        message.cache_salt.encode(),
    )


def _sampling(message: generation_pb2.GenerateRequest, stop_token_ids: frozenset[int]) -> SamplingParams:
    return SamplingParams(
        message.temperature if message.HasField("temperature") else 1.0,
        message.top_k,
        message.top_p if message.HasField("top_p") else 1.0,
        message.min_p,
        message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        message.presence_penalty,
        message.frequency_penalty,
        tuple(sorted(message.logit_bias.items())),
        message.min_tokens,
        tuple(sorted(stop_token_ids)) if message.min_tokens else (),
    )


def _sampling_problems(
    message: generation_pb2.GenerateRequest, sampling: SamplingParams, target: ModelInfo
) -> list[tuple[str, str]]:
    # The stop tokens are checked under their own field name.
    of_client = dataclasses.replace(sampling, end_token_ids=())
    problems = sampling_problems(of_client, target.vocab_size)
    if sampling.changes_logits and TRANSFORMS not in target.capabilities:
        problems += [(name, "not supported by this target") for name in _TRANSFORMS if _present(message, name)]
    if len(sampling.end_token_ids) >= target.vocab_size:
        problems.append(("min_tokens", "every token is a stop token"))
    return problems


def _prompt_ids(message: generation_pb2.GenerateRequest, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if message.WhichOneof("prompt") == "token_ids":
        return tuple(message.token_ids.token_ids)
    assert tokenizer is not None, "refused as a problem before"
    return tuple(tokenizer.encode(message.text).ids)


def _prompt_problems(
    message: generation_pb2.GenerateRequest, target: ModelInfo, tokenizer: Tokenizer | None
) -> list[tuple[str, str]]:
    kind = message.WhichOneof("prompt")
    if kind is None:
        return [("prompt", "one of text, token_ids is required")]
    if kind == "text":
        if tokenizer is None:
            return [("text", "this server has no tokenizer; send token_ids")]
        return [] if message.text else [("text", "must not be empty")]
    ids = message.token_ids.token_ids
    if not ids:
        return [("token_ids", "must not be empty")]
    if max(ids) >= target.vocab_size:
        return [("token_ids", f"{max(ids)} is outside the vocabulary of {target.vocab_size}")]
    return []


def _salt_problems(salt: bytes, target: ModelInfo) -> list[tuple[str, str]]:
    if salt and CACHE_SALT not in target.capabilities:
        return [("cache_salt", "not supported by this target")]
    return []


def _stop_problems(
    message: generation_pb2.GenerateRequest, target: ModelInfo, tokenizer: Tokenizer | None
) -> list[tuple[str, str]]:
    problems = []
    if message.stop and tokenizer is None:
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


def _unknown_fields(message: Message, name: str = "field") -> Iterator[tuple[str, int]]:
    """The first unknown fields of each message: there may be millions, and one is enough to refuse."""
    unknown = UnknownFieldSet(message)
    for index in range(min(len(unknown), _UNKNOWN_FIELDS)):
        yield name, unknown[index].field_number
    for field, value in message.ListFields():
        if isinstance(value, Message):
            yield from _unknown_fields(value, field.name)
        elif field.name == "resume":
            for index, received in value.items():
                yield from _unknown_fields(received, f"resume[{index}]")

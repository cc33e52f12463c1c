"""Sampling parameters <-> protobuf, and their bounds, which are the same for clients and between the services.

Knows values; does not know their effect on a distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from specdec.core.limits import MAX_GRAMMAR_BYTES
from specdec.core.sequence import SamplingParams
from specdec.v1 import common_pb2

MAX_BIASES = 300
MAX_END_TOKENS = 1024
"""Tokens that end a text, those of the request and of the model together."""
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MIN_REPETITION, MAX_REPETITION = 0.01, 10.0
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 256, 64


def sampling_problems(sampling: SamplingParams, vocab_size: int) -> list[tuple[str, str]]:
    """(field, problem) for every value out of its range."""
    return [
        *_filter_problems(sampling),
        *_transform_problems(sampling, vocab_size),
        *_restriction_problems(sampling, vocab_size),
    ]


def _filter_problems(sampling: SamplingParams) -> Iterator[tuple[str, str]]:
    if not (math.isfinite(sampling.temperature) and 0 <= sampling.temperature <= 100):
        yield "temperature", f"must be between 0 and 100, not {sampling.temperature}"
    elif 0 < sampling.temperature < 1e-3:
        yield "temperature", f"must be 0 (greedy) or at least 0.001, not {sampling.temperature}"
    if not 0 < sampling.top_p <= 1:
        yield "top_p", f"must be in (0, 1], not {sampling.top_p}"
    if not 0 <= sampling.min_p <= 1:
        yield "min_p", f"must be in [0, 1], not {sampling.min_p}"


def _transform_problems(sampling: SamplingParams, vocab_size: int) -> Iterator[tuple[str, str]]:
    if not MIN_REPETITION <= sampling.repetition_penalty <= MAX_REPETITION:
        value = sampling.repetition_penalty
        yield "repetition_penalty", f"must be between {MIN_REPETITION} and {MAX_REPETITION}, not {value}"
    for name in ("presence_penalty", "frequency_penalty"):
        if not -MAX_PENALTY <= (value := getattr(sampling, name)) <= MAX_PENALTY:
            yield name, f"must be between {-MAX_PENALTY} and {MAX_PENALTY}, not {value}"
    if len(sampling.logit_bias) > MAX_BIASES:
        yield "logit_bias", f"at most {MAX_BIASES} tokens, not {len(sampling.logit_bias)}"
    if len(sampling.end_token_ids) > MAX_END_TOKENS:
        yield "end_token_ids", f"at most {MAX_END_TOKENS}, not {len(sampling.end_token_ids)}"
    for token_id, bias in sampling.logit_bias:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            yield f"logit_bias[{token_id}]", f"must be between {-MAX_BIAS} and {MAX_BIAS}, not {bias}"
    biased = [token_id for token_id, _ in sampling.logit_bias]
    for name, token_ids in (("logit_bias", biased), ("end_token_ids", sampling.end_token_ids)):
        if token_ids and (largest := max(token_ids)) >= vocab_size:
            yield name, f"{largest} is outside the vocabulary of {vocab_size}"


def _restriction_problems(sampling: SamplingParams, vocab_size: int) -> Iterator[tuple[str, str]]:
    allowed, bad_words = sampling.allowed_token_ids, sampling.bad_words
    if len(allowed) > MAX_ALLOWED_TOKENS:
        yield "allowed_token_ids", f"at most {MAX_ALLOWED_TOKENS}, not {len(allowed)}"
    elif allowed and max(allowed) >= vocab_size:
        yield "allowed_token_ids", f"{max(allowed)} is outside the vocabulary of {vocab_size}"
    elif allowed and sampling.min_tokens and set(allowed) <= set(sampling.end_token_ids):
        yield "min_tokens", "every allowed token is a stop token"
    if (size := len(sampling.grammar.encode())) > MAX_GRAMMAR_BYTES:
        yield "grammar", f"at most {MAX_GRAMMAR_BYTES} bytes, not {size}"
    if len(bad_words) > MAX_BAD_WORDS:
        yield "bad_words", f"at most {MAX_BAD_WORDS}, not {len(bad_words)}"
    for index, word in enumerate(bad_words[:MAX_BAD_WORDS]):
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            yield f"bad_words[{index}]", f"must have 1 to {MAX_BAD_WORD_TOKENS} tokens, not {len(word)}"
        elif max(word) >= vocab_size:
            yield f"bad_words[{index}]", f"{max(word)} is outside the vocabulary of {vocab_size}"


def unknown_fields(message: Message) -> list[tuple[str, str]]:
    """(field, problem) for every field of a later contract. They are refused because they would have no effect."""
    unknown = UnknownFieldSet(message)
    return [(f"field {unknown[i].field_number}", "is not known to this service") for i in range(len(unknown))]


_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "min_tokens", "grammar")


def fields_of(source: object, names: Iterable[str]) -> dict[str, Any]:
    """Fields that have one name and type in messages and values."""
    return {name: getattr(source, name) for name in names}


def write_sampling(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        repetition_penalty=sampling.repetition_penalty if sampling.repetition_penalty != 1.0 else None,
        logit_bias=dict(sampling.logit_bias),
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
        **fields_of(sampling, (*_NUMBERS, "end_token_ids", "allowed_token_ids")),
    )


def read_sampling(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        end_token_ids=tuple(message.end_token_ids),
        allowed_token_ids=tuple(sorted(set(message.allowed_token_ids))),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        **fields_of(message, _NUMBERS),
    )

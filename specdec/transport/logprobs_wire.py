"""Logprobs <-> protobuf, and validation of what a peer sent: no malformed value passes.

Knows both forms; does not know streams and requests. Every ``read_*`` raises InvalidArgument with a field's name.
"""

from __future__ import annotations

from collections.abc import Iterator

from specdec.core.errors import InvalidArgument
from specdec.core.rounds import Logprobs, PromptLogprobs, Verdict
from specdec.v1 import common_pb2, target_pb2

PER_PART = 8192
"""Numbers in a message of the prompt's logprobs, about 64 KiB."""


def write_logprobs(logprobs: Logprobs) -> common_pb2.Logprobs:
    return common_pb2.Logprobs(logprobs=logprobs.logprobs, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs)


def write_prompt_logprobs(sequence: int, verdict: Verdict) -> Iterator[target_pb2.PromptLogprobs]:
    """Those of the prompt in parts: what a part takes of the event loop is bounded."""
    if (logprobs := verdict.prompt_logprobs) is None:
        return
    num_positions = max(1, PER_PART // (1 + logprobs.num_top))
    for start in range(0, len(logprobs), num_positions):
        part = write_logprobs(logprobs.part(start, start + num_positions))
        yield target_pb2.PromptLogprobs(sequence=sequence, position=1 + start, logprobs=part)


def read_logprobs(message: common_pb2.Logprobs, vocab_size: int) -> Logprobs:
    logprobs = message.logprobs[:]
    top_ids, top_logprobs = message.top_ids[:], message.top_logprobs[:]
    if len(top_ids) != len(top_logprobs) or len(top_ids) % max(1, len(logprobs)):
        sizes = f"{len(logprobs)} logprobs with {len(top_ids)} top_ids and {len(top_logprobs)} top_logprobs"
        raise InvalidArgument([("logprobs", f"{sizes}: not as many for each")])
    if top_ids and max(top_ids) >= vocab_size:
        raise InvalidArgument([("logprobs.top_ids", f"{max(top_ids)} is outside the vocabulary of {vocab_size}")])
    if not all(logprob <= 0 for logprob in (*logprobs, *top_logprobs)):  # a NaN is not, either
        raise InvalidArgument([("logprobs", "must not be above 0")])
    return Logprobs(logprobs, top_ids, top_logprobs)


def read_prompt_logprobs(message: target_pb2.PromptLogprobs, vocab_size: int) -> PromptLogprobs:
    return PromptLogprobs(message.position, read_logprobs(message.logprobs, vocab_size))

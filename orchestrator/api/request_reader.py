"""Reads a request: the message of a client becomes a Request, in two steps, with its checks.

The first step takes no time and comes before the request has a place. The second one takes as long as its prompt and
the ids to resume are.
"""

from __future__ import annotations

import dataclasses
import secrets
from array import array
from collections.abc import Collection
from typing import Any

from orchestrator.api import grammars
from orchestrator.api.bounds import MAX_SAMPLES, is_long, size_problems
from orchestrator.api.prompts import Prompts
from orchestrator.api.request_checks import (
    context_exceeded,
    foreign_ids,
    length_problems,
    problems_without_ids,
    tokens_left,
)
from orchestrator.request import Caller, DraftOptions, OutputOptions, Request, Stops, no_ids, prefixes_of
from orchestrator.tokenizer.defaults import Defaults
from specdec.core.errors import InvalidArgument
from specdec.core.rounds import ModelInfo
from specdec.core.sequence import Method, Priority, SamplingParams
from specdec.transport.wire import read_method, read_priority
from specdec.v1 import generation_pb2

Message = generation_pb2.GenerateRequest

NO_DEFAULTS = Defaults()
"""Those of the contract."""


def requested_samples(message: Message) -> int:
    """Number of samples that a request occupies before it is read; 1 if its number is out of range."""
    return message.n if 1 <= message.n <= MAX_SAMPLES else 1


def requested_priority(message: Message) -> Priority:
    """STANDARD if it is unknown."""
    return read_priority(message.priority) or Priority.STANDARD


class RequestReader:
    """``defaults``: of absent fields. ``methods``: those allowed. ``num_draft_tokens``: for requests that name none."""

    def __init__(
        self,
        prompts: Prompts,
        defaults: Defaults = NO_DEFAULTS,
        methods: Collection[Method] = tuple(Method),
        num_draft_tokens: int | None = None,
    ) -> None:
        self._prompts = prompts
        self._defaults = defaults
        self._methods = methods
        self._num_draft_tokens = num_draft_tokens

    def check(self, message: Message, target: ModelInfo) -> Request:
        """Refuse what can be refused in no time, before the request has a place: without the ids of a text, and without
        reading each of very many ids. Returns the request without these: ``read`` adds them.

        Raises InvalidArgument with all violations, or ContextExceeded. Sizes are checked before the rest is read.
        """
        if too_long := list(size_problems(message, target.context_length)):
            raise InvalidArgument(too_long)
        request = self._without_ids(message, target)
        problems = list(problems_without_ids(message, request, target, prompts=self._prompts, methods=self._methods))
        problems += grammars.problems(message, target, self._prompts.tokenizer is not None)
        problems += [] if is_long(message) else foreign_ids(message, target)
        if problems:
            raise InvalidArgument(problems)
        num_ids = self._prompts.fewest_ids(message)
        if message.HasField("token_ids"):
            tokens_left(num_ids, message, target)
        elif num_ids >= target.context_length:  # else the caller is told its length, once that is known
            raise context_exceeded(target.context_length, f"your prompt has at least {num_ids} tokens")
        return request

    def read(self, message: Message, target: ModelInfo, request: Request) -> Request:
        """``request``, which ``check`` returned, with what depends on ids; without its grammar.

        Its time grows with the prompt and the ids to resume. Raises InvalidArgument with all violations, or
        ContextExceeded.
        """
        prompt_ids = self._prompts.ids(message)
        max_tokens = tokens_left(len(prompt_ids), message, target)
        bad_words = self._bad_words(message)
        problems = list(foreign_ids(message, target)) if is_long(message) else []
        problems += length_problems(message, prompt_ids, max_tokens)
        problems += [("bad_words", "has a text without tokens")] if not all(bad_words) else []
        if problems:
            raise InvalidArgument(problems)
        prediction = self._prompts.encoded(message.prediction, False) if message.prediction else no_ids()
        return dataclasses.replace(
            request,
            prompt_ids=prompt_ids,
            sampling=dataclasses.replace(request.sampling, bad_words=bad_words),
            stops=dataclasses.replace(request.stops, max_tokens=max_tokens),
            drafting=dataclasses.replace(request.drafting, prediction=prediction),
            prefixes=prefixes_of(prompt_ids, request.caller.cache_salt + b"\0" + request.adapter.encode()),
            resume={index: array("I", received.token_ids) for index, received in message.resume.items()},
        )

    def _without_ids(self, message: Message, target: ModelInfo) -> Request:
        """``stops.max_tokens`` may depend on the length of the prompt, and is not final."""
        stops = Stops(
            max_tokens=message.max_tokens,
            strings=tuple(message.stop),
            token_ids=self._stop_token_ids(message, target),
            included=message.include_stop_str_in_output,
        )
        return Request(
            prompt_ids=no_ids(),
            sampling=self._sampling(message, stops),
            stops=stops,
            output=OutputOptions(
                num_samples=_value(message, "n", 1),
                skip_special_tokens=_value(message, "skip_special_tokens", True),
                num_logprobs=_value(message, "logprobs", None),
                num_prompt_logprobs=_value(message, "prompt_logprobs", None),
                prompt=message.echo or message.HasField("prompt_logprobs"),
                rounds=message.return_rounds,
            ),
            drafting=DraftOptions(
                method=read_method(message.verification) or Method.COUPLED,
                num_tokens=_value(message, "num_draft_tokens", self._num_draft_tokens),
            ),
            seed=message.seed if message.HasField("seed") else secrets.randbits(64),
            caller=Caller(cache_salt=message.cache_salt.encode()),
            adapter=message.adapter,
            priority=requested_priority(message),
        )

    def _stop_token_ids(self, message: Message, target: ModelInfo) -> frozenset[int]:
        # A special token has no text in an output, so its string would never match there.
        special_ids = self._prompts.special_ids
        special = {special_ids[stop] for stop in message.stop if stop in special_ids}
        drawn = {token_id for token_id in special if token_id < target.vocab_size}
        ends = frozenset(() if message.ignore_eos else target.eos_token_ids)
        return frozenset(message.stop_token_ids) | ends | drawn

    def _sampling(self, message: Message, stops: Stops) -> SamplingParams:
        """Without bad words and grammar."""

        def given(name: str) -> Any:
            return _value(message, name, getattr(self._defaults, name))

        return SamplingParams(
            temperature=given("temperature"),
            top_k=given("top_k"),
            top_p=given("top_p"),
            min_p=given("min_p"),
            repetition_penalty=given("repetition_penalty"),
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            min_tokens=message.min_tokens,
            end_token_ids=tuple(sorted(stops.token_ids)) if message.min_tokens else (),
            allowed_token_ids=tuple(sorted(set(message.allowed_token_ids))),
        )

    def _bad_words(self, message: Message) -> tuple[tuple[int, ...], ...]:
        """The tokens of each text, at the beginning of a text and after a space."""
        texts = [text for word in message.bad_words for text in (word, f" {word}")]
        return tuple(dict.fromkeys(tuple(self._prompts.encoded(text, False)) for text in texts))


def _value(message: Message, name: str, default: Any) -> Any:
    """Of an optional field."""
    return getattr(message, name) if message.HasField(name) else default

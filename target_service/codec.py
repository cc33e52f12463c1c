"""The frames of TargetService.Verify. See specdec.server.streams.Codec."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specdec.core.errors import InvalidArgument, ModelMismatch, SpecdecError, to_status
from specdec.core.rounds import (
    CACHE_SALT,
    GRAMMAR,
    LOGPROBS,
    RESTRICTIONS,
    SELF_DRAFT,
    TRANSFORMS,
    Load,
    ModelInfo,
    Round,
    TargetOpen,
    Verdict,
)
from specdec.transport import wire
from specdec.transport.framing import framed
from specdec.transport.logprobs_wire import write_prompt_logprobs
from specdec.v1 import common_pb2, target_pb2

_TRACED_TIMINGS = ("queue_us", "pass_us", "sample_us", "rows", "sequences")


class TargetCodec:
    def __init__(self, info: ModelInfo) -> None:
        self._info = info

    def split(
        self, frame: target_pb2.VerifyRequest
    ) -> tuple[Iterable[target_pb2.TargetOpen], Iterable[target_pb2.Round], Iterable[int]]:
        return frame.opens, frame.rounds, frame.closes

    def read_open(self, message: target_pb2.TargetOpen) -> TargetOpen:
        wanted = message.spec.model_digest
        if wanted and wanted != self._info.model_digest:
            raise ModelMismatch(f"this target serves {self._info.model_digest}, not {wanted}")
        open_ = wire.read_target_open(message, self._info.vocab_size)
        if problems := list(self._unsupported(open_)):
            raise InvalidArgument(problems)
        return open_

    def _unsupported(self, open_: TargetOpen) -> Iterator[tuple[str, str]]:
        """(field, problem) for what this target cannot do."""
        if open_.adapter and open_.adapter not in self._info.adapters:
            yield "adapter", f"this target has no adapter {open_.adapter[:256]!r}"
        spec, sampling = open_.spec, open_.spec.sampling
        for capability, wanted, field, problem in (
            (TRANSFORMS, sampling.transforms, "spec.sampling", "supports no penalties, logit_bias or min_tokens"),
            (RESTRICTIONS, sampling.restricts, "spec.sampling", "supports no allowed_token_ids and bad_words"),
            (GRAMMAR, sampling.grammar, "spec.sampling", "supports no grammar"),
            (LOGPROBS, open_.num_logprobs is not None, "num_logprobs", "returns no logprobs"),
            (LOGPROBS, open_.num_prompt_logprobs is not None, "num_prompt_logprobs", "returns no logprobs"),
            (CACHE_SALT, spec.cache_salt, "spec.cache_salt", "shares its cache whatever the salt"),
            (SELF_DRAFT, open_.max_self_draft_nodes, "max_self_draft_nodes", "does not draft by itself"),
        ):
            if wanted and capability not in self._info.capabilities:
                yield field, f"this target {problem}"

    def read_entry(self, message: target_pb2.Round) -> Round:
        return wire.read_round(message, self._info.vocab_size)

    def number(self, message: target_pb2.Round) -> int:
        return message.number

    def answers(self, result: Verdict) -> int | None:
        return None if result.num_autonomous_left else result.dropped_round or result.round

    def attributes(self, result: Verdict) -> dict[str, int]:
        numbers = {name: getattr(result, name) for name in ("round", "base")}
        timings = {name: getattr(result.timings, name) for name in _TRACED_TIMINGS}
        return {**numbers, "accepted": len(result.accepted), **timings}

    def frames(
        self, results: Sequence[tuple[int, Any]], unanswered: Iterable[int], load: Load
    ) -> Iterator[target_pb2.VerifyResponse]:
        new = functools.partial(target_pb2.VerifyResponse, load=wire.write_load(load))
        progress = (("progress", target_pb2.Progress(sequence=key, passes=load.passes)) for key in unanswered)
        prompts = (
            ("prompt_logprobs", part)
            for sequence, result in results
            if isinstance(result, Verdict)
            for part in write_prompt_logprobs(sequence, result)
        )
        return framed(new, itertools.chain(prompts, itertools.starmap(_entry, results), progress))


def _entry(sequence: int, result: Any) -> tuple[str, Any]:
    if isinstance(result, SpecdecError):
        return "errors", common_pb2.SequenceError(sequence=sequence, status=to_status(result))
    return "verdicts", wire.write_verdict(sequence, result)

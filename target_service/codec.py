"""The frames of TargetService.Verify. See specdec.server.streams.Codec."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specdec.core.errors import InvalidArgument, ModelMismatch, SpecdecError, to_status
from specdec.core.rounds import (
    CACHE_SALT,
    GRAMMAR,
    LOGPROBS,
    MAX_LOGPROBS,
    RESTRICTIONS,
    SELF_DRAFT,
    TRANSFORMS,
    Load,
    ModelInfo,
    Round,
    Verdict,
)
from specdec.transport import wire
from specdec.transport.framing import framed
from specdec.transport.logprobs_wire import write_prompt_logprobs
from specdec.transport.sampling_wire import MAX_END_TOKENS
from specdec.v1 import common_pb2, target_pb2
from target_service.verifier import TargetOpen


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
        spec = wire.read_spec(message.spec, self._info.vocab_size)
        if spec.sampling.transforms and TRANSFORMS not in self._info.capabilities:
            raise InvalidArgument([("spec.sampling", "this target supports no penalties, logit_bias or min_tokens")])
        if spec.sampling.restricts and RESTRICTIONS not in self._info.capabilities:
            raise InvalidArgument([("spec.sampling", "this target supports no allowed_token_ids and bad_words")])
        if spec.sampling.grammar and GRAMMAR not in self._info.capabilities:
            raise InvalidArgument([("spec.sampling", "this target supports no grammar")])
        for name in ("num_logprobs", "num_prompt_logprobs"):
            if message.HasField(name) and LOGPROBS not in self._info.capabilities:
                raise InvalidArgument([(name, "not possible with this target")])
            if (number := getattr(message, name)) > MAX_LOGPROBS:
                raise InvalidArgument([(name, f"at most {MAX_LOGPROBS}, not {number}")])
        if spec.cache_salt and CACHE_SALT not in self._info.capabilities:
            raise InvalidArgument([("spec.cache_salt", "not possible with this target")])
        if (length := len(message.stop_token_ids)) > MAX_END_TOKENS:
            raise InvalidArgument([("stop_token_ids", f"at most {MAX_END_TOKENS}, not {length}")])
        if message.stop_token_ids and (largest := max(message.stop_token_ids)) >= self._info.vocab_size:
            raise InvalidArgument(
                [("stop_token_ids", f"{largest} is outside the vocabulary of {self._info.vocab_size}")]
            )
        if message.max_self_draft_nodes and SELF_DRAFT not in self._info.capabilities:
            raise InvalidArgument([("max_self_draft_nodes", "this target does not draft by itself")])
        if message.max_self_draft_nodes and not spec.keyed_by_token:
            raise InvalidArgument([("max_self_draft_nodes", f"must be 0 with {spec.method.value} verification")])
        stop_token_ids = frozenset(message.stop_token_ids)
        return TargetOpen(
            spec,
            stop_token_ids,
            message.request_age_ms / 1e3,
            message.num_preemptions,
            message.num_logprobs if message.HasField("num_logprobs") else None,
            message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
            message.max_self_draft_nodes,
        )

    def read_entry(self, message: target_pb2.Round) -> Round:
        return wire.read_round(message, self._info.vocab_size)

    def number(self, message: target_pb2.Round) -> int:
        return message.number

    def answers(self, result: Verdict) -> int | None:
        return None if result.num_autonomous_left else result.dropped_round or result.round

    def attributes(self, result: Verdict) -> dict[str, int]:
        timings = result.timings
        return {
            "round": result.round,
            "base": result.base,
            "accepted": len(result.accepted),
            "queue_us": timings.queue_us,
            "pass_us": timings.pass_us,
            "sample_us": timings.sample_us,
            "rows": timings.rows,
            "sequences": timings.sequences,
        }

    def frames(
        self, results: Sequence[tuple[int, Any]], unanswered: Iterable[int], load: Load
    ) -> Iterator[target_pb2.VerifyResponse]:
        told = wire.write_load(load)

        def new() -> target_pb2.VerifyResponse:
            return target_pb2.VerifyResponse(load=told)

        progress = (("progress", target_pb2.Progress(sequence=each, passes=load.passes)) for each in unanswered)
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

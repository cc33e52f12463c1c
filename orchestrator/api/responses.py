"""The messages to clients: chunks of a sample, and the state of this orchestrator.

Knows the public contract; does not know how a sample is decoded and how a replica is kept connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from orchestrator.outbox import Chunk, Event, PromptPart, RoundReport
from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Replica
from orchestrator.rounds import Source
from orchestrator.sequence import FinishReason
from orchestrator.statistics import Statistics
from orchestrator.text import Origin, Piece
from specdec.core.rounds import ModelInfo
from specdec.core.sequence import Method
from specdec.sampling.token_bytes import TokenBytes
from specdec.transport import wire
from specdec.transport.logprobs_wire import write_logprobs
from specdec.transport.rpc import keepalive
from specdec.v1 import generation_pb2

_ORIGINS = {
    Origin.DRAFT: generation_pb2.TOKEN_ORIGIN_DRAFT,
    Origin.CORRECTION: generation_pb2.TOKEN_ORIGIN_CORRECTION,
    Origin.BONUS: generation_pb2.TOKEN_ORIGIN_BONUS,
    Origin.LOOKUP: generation_pb2.TOKEN_ORIGIN_LOOKUP,
}
_SOURCES = {
    Source.DRAFT: generation_pb2.TOKEN_ORIGIN_DRAFT,
    Source.SELF_DRAFT: generation_pb2.TOKEN_ORIGIN_DRAFT,
    Source.LOOKUP: generation_pb2.TOKEN_ORIGIN_LOOKUP,
    None: generation_pb2.TOKEN_ORIGIN_UNSPECIFIED,
}
_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


def write_event(event: Event, token_bytes: TokenBytes | None) -> generation_pb2.GenerateResponse:
    if isinstance(event, Chunk):
        return generation_pb2.GenerateResponse(chunk=_write_chunk(event, token_bytes))
    if isinstance(event, PromptPart):
        return generation_pb2.GenerateResponse(prompt=_write_prompt(event, token_bytes))
    return generation_pb2.GenerateResponse(round=_write_report(event))


def _write_report(report: RoundReport) -> generation_pb2.RoundReport:
    record, timings = report.record, report.record.timings
    return generation_pb2.RoundReport(
        index=report.index,
        round=report.number,
        base=record.base,
        num_draft_tokens=record.num_nodes if record.number else 0,
        num_accepted_tokens=len(record.accepted),
        source=_SOURCES[record.source] if record.number and record.num_nodes else None,
        draft_wait_us=int(report.draft_wait_s * 1e6),
        path_us=int(report.path_s * 1e6),
        queue_us=timings.queue_us,
        pass_us=timings.pass_us,
        sample_us=timings.sample_us,
        rows=timings.rows,
        sequences=timings.sequences,
    )


def _write_prompt(part: PromptPart, token_bytes: TokenBytes | None) -> generation_pb2.Prompt:
    piece = part.piece
    message = generation_pb2.Prompt(token_ids=piece.token_ids, first_position=part.position)
    if token_bytes is not None:
        message.text = piece.text
        message.text_ends.extend(piece.text_ends)
    _add_logprobs(message, piece, token_bytes)
    return message


def _add_logprobs(message: Any, piece: Piece, token_bytes: TokenBytes | None) -> None:
    """Those of a piece, with the bytes of its tokens."""
    if piece.logprobs is None:
        return
    message.logprobs.CopyFrom(write_logprobs(piece.logprobs))
    if token_bytes is not None:
        message.tokens.extend(map(token_bytes.__getitem__, piece.token_ids))
        message.top_tokens.extend(map(token_bytes.__getitem__, piece.logprobs.top_ids))


def _write_chunk(chunk: Chunk, token_bytes: TokenBytes | None) -> generation_pb2.Chunk:
    piece, finish = chunk.piece, chunk.finish
    message = generation_pb2.Chunk(
        index=chunk.index,
        text=piece.text,
        token_ids=piece.token_ids,
        first_position=chunk.position,
        origins=[_ORIGINS[origin] for origin in piece.origins],
        text_ends=piece.text_ends,
    )
    _add_logprobs(message, piece, token_bytes)
    if finish is not None:
        message.finish.reason = _REASONS[finish.reason]
        if isinstance(finish.matched, str):
            message.finish.stop = finish.matched
        elif finish.matched is not None:
            message.finish.stop_token_id = finish.matched
        message.finish.usage.prompt_tokens = finish.num_prompt_tokens
        message.finish.usage.completion_tokens = finish.num_completion_tokens
        message.finish.usage.cached_prompt_tokens = finish.num_cached
        message.finish.speculation.CopyFrom(_write_statistics(finish.statistics))
    return message


def write_tokens(ids: Sequence[int], token_bytes: TokenBytes | None) -> generation_pb2.TokenizeResponse:
    tokens = [token_bytes[token_id] for token_id in ids] if token_bytes else []
    return generation_pb2.TokenizeResponse(token_ids=ids, tokens=tokens)


def _write_statistics(statistics: Statistics) -> generation_pb2.SpeculationStats:
    names = [field.name for field in generation_pb2.SpeculationStats.DESCRIPTOR.fields]
    return generation_pb2.SpeculationStats(**{name: getattr(statistics, name) for name in names})


def write_server_info(
    targets: Pool,
    drafts: Pool,
    live_sequences: int,
    waiting_requests: int,
    methods: Iterable[Method],
    operator: bool,
) -> generation_pb2.GetServerInfoResponse:
    """``operator``: where the replicas are and what is wrong with them is for the caller, too."""

    def written(info: ModelInfo | None) -> Any:
        return wire.write_info(info) if info else None

    return generation_pb2.GetServerInfoResponse(
        target=written(targets.info),
        draft=written(drafts.info),
        replicas=[
            *(
                _write_replica(pool.role.name, replica, operator)
                for pool in (targets, drafts)
                for replica in pool.replicas
            ),
            *(
                generation_pb2.Replica(
                    address=address if operator else "", role=pool.role.name, problem=problem if operator else ""
                )
                for pool in (targets, drafts)
                for address, problem in pool.unresolved.items()
            ),
        ],
        live_sequences=live_sequences,
        waiting_requests=waiting_requests,
        keepalive=keepalive(),
        methods=map(wire.write_method, methods),
    )


def _write_replica(role: str, replica: Replica, operator: bool) -> generation_pb2.Replica:
    return generation_pb2.Replica(
        address=replica.address if operator else "",
        role=role,
        ready=replica.ready,
        problem=replica.why_not if operator else "",
        prefix_hits=replica.prefixes.hits,
        prefix_spills=replica.prefixes.spills,
        opened_tokens=replica.prefixes.num_tokens,
        cached_tokens=replica.prefixes.num_cached_tokens,
    )

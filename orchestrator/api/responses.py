"""The messages to clients: chunks of a sample, and the state of this orchestrator.

Knows the public contract; does not know how a sample is decoded and how a replica is kept connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from orchestrator.replicas.pool import Pool
from orchestrator.request import Chunk
from orchestrator.sequence import FinishReason
from orchestrator.statistics import Statistics
from orchestrator.text import Origin
from orchestrator.tokenizer.token_bytes import TokenBytes
from specdec.core.rounds import ModelInfo
from specdec.core.sequence import Method
from specdec.transport import wire
from specdec.transport.rpc import keepalive
from specdec.v1 import generation_pb2

_ORIGINS = {
    Origin.DRAFT: generation_pb2.TOKEN_ORIGIN_DRAFT,
    Origin.CORRECTION: generation_pb2.TOKEN_ORIGIN_CORRECTION,
    Origin.BONUS: generation_pb2.TOKEN_ORIGIN_BONUS,
}
_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


def write_chunk(chunk: Chunk) -> generation_pb2.Chunk:
    piece, finish = chunk.piece, chunk.finish
    message = generation_pb2.Chunk(
        index=chunk.index,
        text=piece.text,
        token_ids=piece.token_ids,
        first_position=chunk.position,
        origins=[_ORIGINS[origin] for origin in piece.origins],
        text_ends=piece.text_ends,
    )
    if finish is not None:
        message.finish.reason = _REASONS[finish.reason]
        if isinstance(finish.matched, str):
            message.finish.stop = finish.matched
        elif finish.matched is not None:
            message.finish.stop_token_id = finish.matched
        message.finish.usage.prompt_tokens = finish.num_prompt_tokens
        message.finish.usage.completion_tokens = finish.num_completion_tokens
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
            generation_pb2.Replica(
                address=address if operator else "", role=role, ready=ready, problem=problem if operator else ""
            )
            for address, role, ready, problem in _replicas(targets, drafts)
        ],
        live_sequences=live_sequences,
        waiting_requests=waiting_requests,
        keepalive=keepalive(),
        methods=map(wire.write_method, methods),
    )


def _replicas(*pools: Pool) -> Iterator[tuple[str, str, bool, str]]:
    """Address, role, whether it is ready, and why it is not."""
    for pool in pools:
        for replica in pool.replicas:
            yield replica.address, pool.role.name, replica.ready, replica.why_not
    for pool in pools:
        for address, problem in pool.unresolved.items():
            yield address, pool.role.name, False, problem

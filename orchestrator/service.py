"""GenerationService: a request becomes samples, samples become chunks.

Knows requests, deadlines and what is counted; refuses to know how a sample is decoded (orchestrator.decoder).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import grpc
from opentelemetry import trace
from tokenizers import Tokenizer

from orchestrator.admission import Admission
from orchestrator.controller import Controller
from orchestrator.decoder import Step, decode
from orchestrator.draft_client import DraftClient
from orchestrator.metrics import Metrics
from orchestrator.pool import Pool
from orchestrator.request import Request, read_request
from orchestrator.sequence import FinishReason, Sequence
from orchestrator.settings import OrchestratorSettings
from orchestrator.speculation import Speculation
from orchestrator.target_client import TargetClient
from orchestrator.text import Origin, Piece
from specdec import telemetry, wire
from specdec.errors import DeadlineExceeded, Draining, NoReplica, ReplicaLost
from specdec.noise import derive_seed
from specdec.rounds import ModelInfo
from specdec.rpc import keepalive, request_metadata
from specdec.v1 import generation_pb2, generation_pb2_grpc

log = logging.getLogger(__name__)

_BUFFERED_CHUNKS = 32
"""Chunks a slow client may be behind before its sequences stand still."""

_ORIGINS = {
    Origin.DRAFT: generation_pb2.TOKEN_ORIGIN_DRAFT,
    Origin.CORRECTION: generation_pb2.TOKEN_ORIGIN_CORRECTION,
    Origin.BONUS: generation_pb2.TOKEN_ORIGIN_BONUS,
}
_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(
        self,
        targets: Pool,
        drafts: Pool,
        tokenizer: Tokenizer | None,
        settings: OrchestratorSettings,
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._tracer = trace.get_tracer("specdec")
        self._targets = targets
        self._drafts = drafts
        self._tokenizer = tokenizer
        self._settings = settings
        self._admission = Admission(settings.max_live_sequences, settings.max_waiting_requests)
        self._draining = False

    @property
    def live_sequences(self) -> int:
        return self._admission.live

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait until those that are there have ended."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._admission.live or self._admission.waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("requests did not end in time", extra={"live_sequences": self._admission.live})

    async def GetServerInfo(
        self, request: generation_pb2.GetServerInfoRequest, context: Any
    ) -> generation_pb2.GetServerInfoResponse:
        def written(info: ModelInfo | None) -> Any:
            return wire.write_info(info) if info else None

        return generation_pb2.GetServerInfoResponse(
            target=written(self._targets.info),
            draft=written(self._drafts.info),
            replicas=[
                generation_pb2.Replica(
                    address=replica.address, role=replica.role.name, ready=replica.ready, problem=replica.problem
                )
                for replica in (*self._targets.replicas, *self._drafts.replicas)
            ]
            + [
                generation_pb2.Replica(address=address, role=role, problem=problem)
                for role, pool in (("target", self._targets), ("draft", self._drafts))
                for address, problem in pool.unresolved.items()
            ],
            live_sequences=self.live_sequences,
            waiting_requests=self._admission.waiting,
            keepalive=keepalive(),
        )

    async def Generate(
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        started = time.monotonic()
        metadata = request_metadata.get({})
        request_id = metadata.get("x-request-id") or uuid.uuid4().hex
        remaining = context.time_remaining()
        deadline_s = min(remaining or self._settings.request_timeout_s, self._settings.request_timeout_s)
        outcome = "cancelled"
        with self._tracer.start_as_current_span(
            "generate", telemetry.context_of(metadata.get("traceparent")), attributes={"request_id": request_id}
        ) as span:
            try:
                async with aclosing(self._generate(request, request_id, started + deadline_s)) as responses:
                    async for response in responses:
                        yield response
                outcome = "ok"
            except Exception as error:
                outcome = type(error).__name__
                raise
            finally:
                span.set_attribute("outcome", outcome)
                duration_s = time.monotonic() - started
                self._metrics.request_ended(outcome, duration_s)
                log.info(
                    "request ended",
                    extra={"request_id": request_id, "outcome": outcome, "duration_s": round(duration_s, 3)},
                )

    async def _generate(
        self, message: generation_pb2.GenerateRequest, request_id: str, deadline: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        if self._draining:
            raise Draining("this orchestrator is going away; use another")
        target = await self._target_info(deadline)
        request = read_request(message, target, self._tokenizer, self._settings.num_draft_tokens)
        async with AsyncExitStack() as stack:
            turn = self._admission.admitted(request.num_samples)
            await _before(deadline, stack.enter_async_context(turn))
            yield generation_pb2.GenerateResponse(
                admission=generation_pb2.Admission(
                    request_id=request_id,
                    seed=request.seed,
                    model_digest=target.model_digest,
                    num_prompt_tokens=len(request.prompt_ids),
                )
            )
            chunks: asyncio.Queue[Any] = asyncio.Queue(_BUFFERED_CHUNKS)
            samples = [
                asyncio.create_task(self._sample(request, index, target.model_digest, chunks))
                for index in range(request.num_samples)
            ]
            stack.push_async_callback(_end, samples)
            unfinished = len(samples)
            while unfinished:
                chunk = await _before(deadline, chunks.get()) if chunks.empty() else chunks.get_nowait()
                if isinstance(chunk, BaseException):
                    raise chunk
                unfinished -= chunk.HasField("finish")
                yield generation_pb2.GenerateResponse(chunk=chunk)

    async def _target_info(self, deadline: float) -> ModelInfo:
        if (info := self._targets.info) is not None:
            return info
        wait_s = min(self._settings.target_wait_s, max(0.0, deadline - time.monotonic()))
        try:
            replica = await self._targets.wait_for_one(wait_s)
        except ReplicaLost as error:
            raise NoReplica(str(error)) from error
        assert replica.info is not None, "a replica that can be used has told its model"
        return replica.info

    async def _sample(self, request: Request, index: int, model_digest: str, chunks: asyncio.Queue[Any]) -> None:
        """Decode one sample into ``chunks``; an exception goes there too."""
        received = request.resume.get(index, ())
        sequence = Sequence(
            request.prompt_ids,
            request.max_tokens,
            request.sampling,
            derive_seed(request.seed, index),
            request.method,
            request.stop_token_ids,
            request.stop,
            self._tokenizer,
            received,
        )
        span = trace.get_current_span()
        traceparent = telemetry.traceparent()
        wait_s = self._settings.target_wait_s
        position = len(received)
        try:
            async with (
                TargetClient(self._targets, model_digest, traceparent, wait_s, time.monotonic()) as target,
                DraftClient(self._drafts, traceparent) as draft,
                aclosing(decode(sequence, target, Speculation(draft), Controller(request.num_draft_tokens))) as steps,
            ):
                if sequence.finished:
                    await chunks.put(_chunk(index, position, Piece(), sequence))
                async for step in steps:
                    self._metrics.round_ended(step)
                    if span.is_recording():
                        span.add_event("round", _round_attributes(index, step))
                    if step.piece or sequence.finished:
                        await self._hand_over(_chunk(index, position, step.piece, sequence), chunks, target, draft)
                        position += len(step.piece.token_ids)
        except Exception as error:
            await chunks.put(error)

    async def _hand_over(
        self, chunk: generation_pb2.Chunk, chunks: asyncio.Queue[Any], target: TargetClient, draft: DraftClient
    ) -> None:
        """A client that does not read stops its own sequences, and after a while they hold no memory either."""
        if not chunks.full():
            chunks.put_nowait(chunk)
            return
        try:
            async with asyncio.timeout(self._settings.park_after_s):
                await chunks.put(chunk)
        except TimeoutError:
            self._metrics.parked()
            target.park()
            draft.park()
            await chunks.put(chunk)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _before(deadline: float, awaitable: Any) -> Any:
    try:
        # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the result.
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await awaitable
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the generation ended") from None


def _chunk(index: int, position: int, piece: Piece, sequence: Sequence) -> generation_pb2.Chunk:
    chunk = generation_pb2.Chunk(
        index=index,
        text=piece.text,
        token_ids=piece.token_ids,
        first_position=position,
        origins=[_ORIGINS[origin] for origin in piece.origins],
        text_ends=piece.text_ends,
    )
    if sequence.finish_reason is not None:
        finish = chunk.finish
        finish.reason = _REASONS[sequence.finish_reason]
        if isinstance(sequence.matched, str):
            finish.stop = sequence.matched
        elif sequence.matched is not None:
            finish.stop_token_id = sequence.matched
        finish.usage.prompt_tokens = sequence.num_prompt_tokens
        finish.usage.completion_tokens = position + len(piece.token_ids)
        statistics = sequence.statistics
        finish.speculation.num_rounds = statistics.num_rounds
        finish.speculation.num_drafts = statistics.num_drafts
        finish.speculation.num_draft_tokens = statistics.num_draft_tokens
        finish.speculation.num_accepted_tokens = statistics.num_accepted_tokens
        finish.speculation.num_accepted_tokens_per_pos.extend(statistics.num_accepted_tokens_per_pos)
        finish.speculation.num_replays = statistics.num_replays
    return chunk


def _round_attributes(index: int, step: Step) -> dict[str, int]:
    timings = step.verdict.timings
    return {
        "index": index,
        "base": step.verdict.base,
        "num_draft_tokens": len(step.tree),
        "num_accepted_tokens": len(step.verdict.accepted),
        "target_queue_us": timings.queue_us,
        "target_pass_us": timings.pass_us,
        "target_sample_us": timings.sample_us,
    }

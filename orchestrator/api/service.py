"""GenerationService: admits requests, answers them within their deadline, and counts them.

Knows requests; does not know samples (orchestrator.generation) and messages (orchestrator.api.responses).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from orchestrator.api.admission import Admission
from orchestrator.api.api_keys import Account, ApiKeys
from orchestrator.api.bounds import MAX_DETOKENIZED_IDS, MAX_REQUEST_ID, is_long, prompt_size_problems
from orchestrator.api.grammars import THINKS, RequestGrammars, is_supported, of_caller
from orchestrator.api.prompts import Prompts
from orchestrator.api.request_checks import text_problems, unknown_problems
from orchestrator.api.request_reader import RequestReader, requested_priority, requested_samples
from orchestrator.api.responses import write_event, write_server_info, write_tokens
from orchestrator.generation import Generator
from orchestrator.outbox import Chunk
from orchestrator.request import Caller, Request
from orchestrator.sample import Services
from orchestrator.telemetry.metrics import RequestClock
from orchestrator.tokenizer.defaults import Defaults
from specdec.core.errors import CALLERS_FAULTS, DeadlineExceeded, Draining, InvalidArgument, NoReplica
from specdec.core.rounds import CACHE_SALT, ModelInfo
from specdec.telemetry import setup as telemetry
from specdec.transport.rpc import INSTANCE, request_metadata
from specdec.v1 import generation_pb2, generation_pb2_grpc

log = logging.getLogger(__name__)


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(
        self,
        services: Services,
        prompts: Prompts,
        *,
        defaults: Defaults,
        grammars: RequestGrammars | None,
    ) -> None:
        settings = services.settings
        self._metrics = services.metrics
        self._tracer = trace.get_tracer("specdec")
        self._targets = services.targets
        self._drafts = services.drafts
        self._prompts = prompts
        self._settings = settings
        self._workers = services.workers
        self._generator = Generator(services)
        self._reader = RequestReader(prompts, defaults, settings.methods, num_draft_tokens=settings.num_draft_tokens)
        self._admission = Admission(settings.max_live_sequences, settings.max_waiting_requests)
        # Next to that of samples: what takes milliseconds does not wait behind what takes minutes.
        self._text_admission = Admission(settings.max_live_sequences, settings.max_waiting_requests)
        self._api_keys = ApiKeys(settings.api_keys_file)
        self._grammars = grammars
        self._num_calls = 0  # running calls of Generate
        self._deadlines: set[asyncio.Timeout] = set()  # of running calls
        self._cut_off = False  # a drain is over, and these calls end with it
        self._instance = uuid.uuid4().hex

    @property
    def live_sequences(self) -> int:
        return self._admission.live

    @property
    def waiting_requests(self) -> int:
        return self._admission.waiting

    async def prepare(self) -> None:
        """What a first request would wait for otherwise."""
        if self._grammars is not None and is_supported(target := await self._target_info()):
            await self._grammars.prepare(target)

    async def close(self) -> None:
        if self._grammars is not None:
            await self._grammars.close()

    async def drain(self, timeout_s: float) -> None:
        """Wait until the running requests have ended; the server accepts no new ones by then. After ``timeout_s`` they
        end with Draining."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_calls:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("requests did not end in time", extra={"live_sequences": self._admission.live})
            self._cut_off = True
            for deadline in self._deadlines:
                if not deadline.expired():
                    deadline.reschedule(0.0)  # long past

    async def GetServerInfo(
        self, request: generation_pb2.GetServerInfoRequest, context: Any
    ) -> generation_pb2.GetServerInfoResponse:
        info = write_server_info(
            self._targets,
            self._drafts,
            live_sequences=self.live_sequences,
            waiting_requests=self.waiting_requests,
            methods=self._settings.methods,
            operator=self._account().operator,
        )
        info.model_name = self._settings.model_name or info.target.name
        info.instance = self._instance
        if self._prompts.tokenizer is not None:
            info.tokenizer.bos_token = self._prompts.special_tokens.get("bos_token", "")
            info.tokenizer.eos_token = self._prompts.special_tokens.get("eos_token", "")
            info.tokenizer.chat_template = self._prompts.template.source if self._prompts.template else ""
        return info

    async def Tokenize(self, request: generation_pb2.TokenizeRequest, context: Any) -> generation_pb2.TokenizeResponse:
        account = self._account()
        problems = [*prompt_size_problems(request)] or [
            *unknown_problems(request),
            *text_problems(request, self._prompts),
        ]
        if problems:
            raise InvalidArgument(problems)
        async with account.used_by(1), self._text_admission.admitted(1):
            ids = await self._workers.run(partial(self._prompts.tokenized, request), account.name)
            account.spend(len(ids))
            return await self._workers.run(partial(write_tokens, ids, self._prompts.token_bytes), account.name)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Any
    ) -> generation_pb2.DetokenizeResponse:
        account = self._account()
        tokenizer, ids = self._prompts.tokenizer, request.token_ids
        problems = unknown_problems(request)
        if tokenizer is None:
            problems.append(("token_ids", "this server has no tokenizer"))
        elif len(ids) > MAX_DETOKENIZED_IDS:
            problems.append(("token_ids", f"at most {MAX_DETOKENIZED_IDS}, not {len(ids)}"))
        if problems or tokenizer is None:
            raise InvalidArgument(problems)
        decode = partial(tokenizer.decode, ids[:], skip_special_tokens=request.skip_special_tokens)
        async with account.used_by(1), self._text_admission.admitted(1):
            account.spend(len(ids))
            return generation_pb2.DetokenizeResponse(text=await self._workers.run(decode, account.name))

    # Writes to the context instead of yielding, so that the deadline also ends a write to a client that does not read.
    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        clock = RequestClock()
        metadata = request_metadata.get({})
        request_id = metadata.get("x-request-id", "")[:MAX_REQUEST_ID] or uuid.uuid4().hex
        remaining = context.time_remaining()
        deadline_s = min(remaining or self._settings.request_timeout_s, self._settings.request_timeout_s)
        outcome, account = "cancelled", None
        self._num_calls += 1
        with self._tracer.start_as_current_span(
            "generate",
            telemetry.context_of(metadata.get("traceparent")),
            SpanKind.SERVER,
            attributes={"request_id": request_id},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                # Before anything that may end this process: so the client knows which process has its request.
                await context.send_initial_metadata(((INSTANCE, self._instance),))
                account = self._account()
                async with (
                    self._within(deadline_s),
                    aclosing(self._responses(request, request_id, account)) as responses,
                ):
                    async for response in responses:
                        await context.write(response)
                        if response.HasField("chunk"):
                            clock.wrote(response.chunk.index, len(response.chunk.token_ids))
                outcome = "ok"
            except Exception as error:
                outcome = type(error).__name__
                if not isinstance(error, CALLERS_FAULTS):
                    span.record_exception(error)
                    span.set_status(StatusCode.ERROR, str(error))
                if isinstance(error, InvalidArgument):  # a target names the fields of its own contract
                    raise of_caller(error, request) from error
                if isinstance(error, NoReplica):
                    log.warning("no replica for a request", extra={"request_id": request_id, "problem": str(error)})
                    if account is None or not account.operator:
                        raise type(error)(error.for_clients) from error
                raise
            finally:
                self._num_calls -= 1
                span.set_attribute("outcome", outcome)
                self._metrics.request_ended(outcome, clock)
                log.info(
                    "request ended",
                    extra={
                        "request_id": request_id,
                        "api_key": account.name if account else "",
                        "outcome": outcome,
                        "duration_s": round(clock.duration_s, 3),
                    },
                )

    async def _responses(
        self, message: generation_pb2.GenerateRequest, request_id: str, account: Account
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        arrived, num_samples = time.monotonic(), requested_samples(message)
        async with AsyncExitStack() as bounds:
            await bounds.enter_async_context(account.used_by(num_samples))
            # What is invalid is refused at once. But a request waits for a target, and its prompt is tokenized, only
            # once it has a place.
            if target := self._targets.info:
                checked = self._reader.check(message, target)
            await bounds.enter_async_context(self._admission.admitted(num_samples, requested_priority(message)))
            present = await self._target_info()
            if target is None or present.model_digest != target.model_digest:  # replaced while the request waited
                target, checked = present, self._reader.check(message, present)
            request = await self._read(message, target, checked, account=account)
            async with aclosing(self._generator.events(request, target, arrived)) as events:
                account.spend(request.num_given_ids)
                yield generation_pb2.GenerateResponse(
                    admission=generation_pb2.Admission(
                        request_id=request_id,
                        seed=request.seed,
                        model_digest=target.model_digest,
                        num_prompt_tokens=len(request.prompt_ids),
                        in_reasoning=message.reasoning and self._prompts.end(request.prompt_ids).endswith(THINKS),
                    )
                )
                async for event in events:
                    if isinstance(event, Chunk):
                        account.spend(len(event.piece.token_ids))
                    yield write_event(event, self._prompts.token_bytes)

    async def _read(
        self, message: generation_pb2.GenerateRequest, target: ModelInfo, checked: Request, account: Account
    ) -> Request:
        owner = account.salt(checked.caller.cache_salt)
        caller = Caller(account.name, owner, cache_salt=owner if CACHE_SALT in target.capabilities else b"")
        read = partial(self._reader.read, message, target, request=dataclasses.replace(checked, caller=caller))
        request = await self._workers.run(read, account.name) if is_long(message) else read()
        if self._grammars is None:
            return request
        prompt_end = self._prompts.end(request.prompt_ids) if message.reasoning else ""
        grammar = await self._grammars.read(message, target, caller, prompt_end=prompt_end)
        return dataclasses.replace(
            request,
            sampling=dataclasses.replace(request.sampling, grammar=grammar.text),
            drafting=dataclasses.replace(request.drafting, grammar=grammar.compiled),
        )

    def _account(self) -> Account:
        """The account of the caller. Raises Unauthenticated."""
        return self._api_keys.account(request_metadata.get({}).get("authorization"))

    async def _target_info(self) -> ModelInfo:
        if (info := self._targets.info) is not None:
            return info
        replica = await self._targets.wait_for_one(self._settings.target_wait_s)
        assert replica.info is not None, "a replica that can be used has sent its model"
        return replica.info

    @asynccontextmanager
    async def _within(self, deadline_s: float) -> AsyncIterator[None]:
        try:
            # One timer per request. Not wait_for: in Python 3.11 it loses a cancellation that comes with the result.
            async with asyncio.timeout(max(0.0, deadline_s)) as deadline:
                self._deadlines.add(deadline)
                try:
                    yield
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if self._cut_off:
                raise Draining("this orchestrator ends, and the time for running requests is over") from None
            raise DeadlineExceeded("the deadline passed before the generation ended") from None

"""The orchestrator, assembled: pools of replicas, the checks that admit them, the public service."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from contextlib import AsyncExitStack
from typing import Any

from orchestrator.api.bounds import MAX_REQUEST_BYTES
from orchestrator.api.grammars import RequestGrammars
from orchestrator.api.prompts import Prompts
from orchestrator.api.service import GenerationServicer
from orchestrator.replicas.frames import DraftFrames, TargetFrames
from orchestrator.replicas.link import Frames, Link
from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Role
from orchestrator.sample import Services
from orchestrator.settings import OrchestratorSettings
from orchestrator.telemetry import pool_metrics
from orchestrator.telemetry.metrics import Metrics
from orchestrator.tokenizer.chat_template import ChatTemplate, special_tokens
from orchestrator.tokenizer.defaults import Defaults
from orchestrator.tokenizer.files import find
from orchestrator.workers import Workers
from specdec.core.errors import ModelMismatch, ReplicaLost
from specdec.core.rounds import ModelInfo
from specdec.runner.files import read_json
from specdec.runner.vocabulary import Vocabulary, mismatch, read_tokenizer
from specdec.security import tls
from specdec.telemetry.process_metrics import ProcessMetrics
from specdec.transport import rpc
from specdec.v1 import draft_pb2_grpc, generation_pb2, generation_pb2_grpc, target_pb2_grpc

log = logging.getLogger(__name__)

_FLUSH_S = 0.25  # for the last messages of ended requests

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


class OrchestratorServer:
    """The server. It listens once started; it is ready once there is a target. Create it on the serving event loop.

    Raises ValueError, with the reason in words, if a file named in the settings is invalid.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        files = find(settings.tokenizer, settings.revision)
        tokenizer = read_tokenizer(files.tokenizer) if files else None
        template = ChatTemplate.read(files) if files else None
        prompts = Prompts(tokenizer, template, special_tokens(read_json(files.config)) if files else None)
        defaults = Defaults.read(files.generation if files and settings.generation_config == "auto" else None)
        log.info("defaults of sampling", extra=dataclasses.asdict(defaults))
        self._vocabulary = Vocabulary.of(tokenizer) if tokenizer else None

        def link(method: Any, frames: Frames) -> Link:
            return Link(method, frames, watchdog_s=settings.watchdog_s, stuck_after_s=settings.stuck_after_s)

        certificates = tls.of(settings, "orchestrator")
        target = Role(
            name="target",
            stub=target_pb2_grpc.TargetServiceStub,
            connect=lambda stub, info: link(stub.Verify, TargetFrames(info.vocab_size)),
            admit=self._admit_target,
            tls=certificates,
        )
        draft = Role(
            name="draft",
            stub=draft_pb2_grpc.DraftServiceStub,
            connect=lambda stub, info: link(stub.Draft, DraftFrames(info.vocab_size)),
            admit=self._admit_draft,
            tls=certificates,
        )
        shared = settings.resolve_every_s, settings.prefix_choice
        self.targets = Pool(target, settings.target, *shared, changed=self._compare_drafts)
        self.drafts = Pool(draft, settings.draft, *shared)
        grammars = RequestGrammars(files.tokenizer) if files else None
        services = Services(
            targets=self.targets,
            drafts=self.drafts,
            tokenizer=tokenizer,
            settings=settings,
            metrics=Metrics(),
            workers=Workers(),
        )
        self._servicer = GenerationServicer(services, prompts, defaults=defaults, grammars=grammars)
        pool_metrics.register(
            self.targets,
            self.drafts,
            num_live=lambda: self.live_sequences,
            num_waiting=lambda: self._servicer.waiting_requests,
        )
        self._process_metrics = ProcessMetrics("orchestrator")
        # Clients authenticate with a token, not with a certificate.
        options = [*rpc.aging(settings.max_connection_age_s), ("grpc.max_receive_message_length", MAX_REQUEST_BYTES)]
        self._server = rpc.Server(
            settings, [SERVICE], options, tls=certificates, public=True, shared_port=settings.shared_port
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._servicer, self._server.grpc)
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def health_port(self) -> int:
        return self._server.health_port

    @property
    def live_sequences(self) -> int:
        return self._servicer.live_sequences

    async def start(self) -> None:
        await self._server.start()
        self._process_metrics.start()
        await self._stack.enter_async_context(self.targets)
        await self._stack.enter_async_context(self.drafts)
        self._tasks.append(asyncio.create_task(self._follow_targets(self._settings.target_wait_s)))

    def prepare(self) -> None:
        """Start, in the background, what a first request would wait for otherwise."""
        self._tasks.append(asyncio.create_task(self._servicer.prepare()))

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no new connections and requests, let running ones end within the grace period, then close."""
        for task in self._tasks:
            task.cancel()
        # Connections get GOAWAY first, so that their clients send the next request elsewhere.
        until = time.monotonic() + grace_s
        closing = asyncio.create_task(self._server.stop(grace_s))
        # What does not end in time gets an error, while the connections still are there.
        await self._servicer.drain(grace_s - min(_FLUSH_S, grace_s / 2))
        # Time to flush the last messages. Waiting longer gains nothing, since health watches never end.
        await asyncio.wait({closing}, timeout=min(_FLUSH_S, grace_s))
        # Requests that came while the connections got GOAWAY.
        await self._servicer.drain(max(0.0, until - time.monotonic()))
        # Never two stops at a time: grpcio's server may crash if one ends while another begins. Near the end of its
        # grace period a stop is not cancelled: that would cancel the future that the next stop waits for.
        if time.monotonic() < until - _FLUSH_S:
            closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await self._server.stop(0)
        await self._servicer.close()
        await self._stack.aclose()
        await self._process_metrics.stop()

    async def _follow_targets(self, grace_s: float) -> None:
        """Say whether requests can be served, until cancelled: from the first ready target on, until for ``grace_s``
        none was ready. Within the grace, which is a request's wait for a target, the only target may be replaced."""
        while True:
            try:
                async with asyncio.timeout(grace_s):
                    await self.targets.until(ready=True)
            except TimeoutError:
                extra = {"for_s": grace_s, "problems": self.targets.problems()}
                log.warning("not ready: there is no target", extra=extra)
                self._server.set_serving(False)
                await self.targets.until(ready=True)
            self._server.set_serving(True)
            await self.targets.until(ready=False)

    def _admit_target(self, address: str, info: ModelInfo) -> None:
        """Raises ModelMismatch unless the target has the tokenizer's vocabulary and the expected model: that of the
        settings and of the targets in use."""
        mine = self._vocabulary.below(info.vocab_size) if self._vocabulary else None
        if mine and info.tokenizer_fingerprint not in ("", mine.fingerprint):
            problem = f"has the vocabulary {info.tokenizer_fingerprint[:12]}, the tokenizer {mine.fingerprint[:12]}"
            if difference := mine.difference(info.tokens):
                problem = f"has another vocabulary than the tokenizer: {difference}"
            raise ModelMismatch(f"target {address} {problem}")
        if not info.model_digest.startswith(expected := self._settings.model_digest):
            raise ModelMismatch(
                f"target {address} serves the model {info.model_digest[:12]}, model_digest names {expected[:12]}"
            )
        in_use = self.targets.info_in_use
        if in_use and in_use.model_digest != info.model_digest:
            raise ModelMismatch(
                f"target {address} serves the model {info.model_digest[:12]}, the others {in_use.model_digest[:12]}"
            )

    def _compare_drafts(self) -> None:
        """Compare all drafts again: a new target may have another vocabulary."""
        for draft in self.drafts.replicas:
            draft.compare()

    def _admit_draft(self, address: str, info: ModelInfo) -> None:
        """Raises ModelMismatch unless the draft shares the target's vocabulary, ReplicaLost if there is no target."""
        target = self.targets.info
        if target is None:
            raise ReplicaLost("no target to compare its vocabulary with yet")
        if problem := mismatch(info, target, self._vocabulary):
            raise ModelMismatch(f"draft {address} {problem}")

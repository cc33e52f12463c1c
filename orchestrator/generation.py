"""Generation: decodes the samples of a checked request concurrently, and yields the events of its answer as they come.

Knows the parts of a sample; does not know what the loop decides (orchestrator.decoder), deadlines and admission.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from opentelemetry import trace
from tokenizers import Tokenizer

from orchestrator.control.controller import Adaptive, Controller, Fixed
from orchestrator.control.cost_model import CostModel
from orchestrator.control.draft_length import DraftLength
from orchestrator.control.self_draft_length import SelfDraftLength
from orchestrator.decoder import decode
from orchestrator.drafting.draft_client import DraftClient
from orchestrator.drafting.forced_tokens import ForcedTokens
from orchestrator.drafting.prompt_lookup import HitRates, PromptLookup
from orchestrator.drafting.speculation import Speculation
from orchestrator.drafting.text_history import TextHistory
from orchestrator.outbox import Outbox
from orchestrator.replicas.pool import Pool
from orchestrator.request import Chunk, Event, PromptPart, Request, RoundReport
from orchestrator.rounds import RoundRecord
from orchestrator.sequence import Sequence
from orchestrator.settings import OrchestratorSettings
from orchestrator.target_client import TargetClient
from orchestrator.telemetry.metrics import Metrics
from orchestrator.telemetry.round_clock import PARTS, RoundClock, Split
from orchestrator.text import Piece, pieces_of
from orchestrator.workers import Workers
from specdec.core.noise import derive_seed
from specdec.core.rounds import Logprobs, ModelInfo
from specdec.core.sequence import SamplingParams
from specdec.core.tree import EMPTY_TREE
from specdec.speculation.acceptance import AcceptanceModel
from specdec.telemetry import setup as telemetry

_MANY_RECEIVED_IDS = 256
_PROMPT_PART = 1024
"""Tokens of the prompt in one event."""

_MAX_ADAPTIVE_DRAFT_TOKENS = 8
"""Draft tokens per round at most if neither the request nor the settings fix a number."""

_PARTS = [(part, f"{part.removeprefix('model_')}_us") for part in PARTS]


class Generator:
    """Decodes requests with the replicas of two pools."""

    def __init__(
        self,
        targets: Pool,
        drafts: Pool,
        tokenizer: Tokenizer | None,
        settings: OrchestratorSettings,
        metrics: Metrics,
        workers: Workers,
    ) -> None:
        self._targets = targets
        self._drafts = drafts
        self._tokenizer = tokenizer
        self._settings = settings
        self._metrics = metrics
        self._workers = workers
        self._costs = CostModel()
        # By whether drafts grow ahead of the sequence: under token and block verification its rounds always wait.
        self._policies = [DraftLength(self._costs, _MAX_ADAPTIVE_DRAFT_TOKENS, ahead) for ahead in (False, True)]
        self._self_draft = SelfDraftLength(self._costs, _MAX_ADAPTIVE_DRAFT_TOKENS)
        # What is learnt of all requests is the prior of the next one.
        self._acceptance, self._self_draft_acceptance, self._hit_rates = (
            AcceptanceModel(),
            AcceptanceModel(),
            HitRates(),
        )
        self._history = TextHistory(settings.lookup_history) if settings.lookup_history else None

    async def events(self, request: Request, target: ModelInfo, arrived: float) -> AsyncGenerator[Event, None]:
        """All events of all samples, by replicas of the model ``target``. ``arrived``: when the request arrived
        (monotonic clock). Raises the first SpecdecError that ends a sample. Closing the generator ends all samples."""
        outbox = Outbox(self._settings.park_after_s)
        prompt_sent = asyncio.Event()
        samples: list[asyncio.Task[None]] = []
        try:
            for index in range(request.num_samples):
                begun = self._sample(request, index, target, arrived, outbox, prompt_sent)
                samples.append(asyncio.create_task(begun))
                # Each copies the prompt, and all of them in one turn would hold up other streams.
                await asyncio.sleep(0)
            unfinished = len(samples)
            while unfinished:
                event: Event = await outbox.get()
                unfinished -= isinstance(event, Chunk) and event.finish is not None
                yield event
        finally:
            for sample in samples:
                sample.cancel()
            await asyncio.gather(*samples, return_exceptions=True)

    async def _sample(
        self,
        request: Request,
        index: int,
        target: ModelInfo,
        arrived: float,
        outbox: Outbox,
        prompt_sent: asyncio.Event,
    ) -> None:
        """Decode one sample into the outbox, with any error."""
        try:
            await self._decode(request, index, target, arrived, outbox, prompt_sent)
        except Exception as error:
            await outbox.fail(error)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception, and must not be lost
            await outbox.fail(RuntimeError(f"a sample failed: {error!r}"))

    async def _decode(
        self,
        request: Request,
        index: int,
        model: ModelInfo,
        arrived: float,
        outbox: Outbox,
        prompt_sent: asyncio.Event,
    ) -> None:
        received = request.resume.get(index, ())
        make = partial(
            Sequence,
            request.prompt_ids,
            request.max_tokens,
            request.sampling,
            derive_seed(request.seed, index),
            request.method,
            request.stop_token_ids,
            request.stop,
            self._tokenizer,
            received,
            request.cache_salt,
            request.include_stop,
            request.skip_special_tokens,
            request.num_logprobs,
            # The prompt is the same for all samples.
            None if index else request.num_prompt_logprobs,
        )
        # Detokenizing many ids takes long and must not block the event loop.
        sequence = await self._workers.run(make, request.account) if len(received) > _MANY_RECEIVED_IDS else make()
        fixed = request.num_draft_tokens
        looks_up = fixed is None and sequence.keyed_by_token
        lookup: PromptLookup | ForcedTokens | None = None
        if looks_up:
            lookup = PromptLookup(self._hit_rates, request.prediction, self._history, request.owner)
            if request.grammar is not None:
                lookup = ForcedTokens(request.grammar, sequence.num_prompt_tokens, lookup)
        acceptance = AcceptanceModel(self._acceptance)
        ahead, siblings = self._settings.num_ahead_tokens, 0 if model.max_chain else self._settings.num_siblings
        grows_ahead = ahead > 0 and sequence.keyed_by_token
        self_drafts = bool(model.self_draft) and sequence.keyed_by_token
        self_draft = (
            (self._self_draft, AcceptanceModel(self._self_draft_acceptance), model.self_draft_nodes)
            if self_drafts
            else ()
        )
        controller: Controller = (
            Adaptive(self._policies[grows_ahead], acceptance, lookup, siblings, model.max_chain, *self_draft)
            if fixed is None
            else Fixed(min(fixed, model.max_chain or fixed), self._costs, self_drafts)
        )
        wanted_self_draft_nodes = model.self_draft_nodes or _MAX_ADAPTIVE_DRAFT_TOKENS if fixed is None else fixed
        span = trace.get_current_span()
        traceparent = telemetry.traceparent()
        wait_s = self._settings.target_wait_s
        position = len(received)
        remembered = sequence.base  # see TextHistory.add
        draft = DraftClient(self._drafts, traceparent)
        speculation = Speculation(draft, ahead, siblings, acceptance, lookup, chains=bool(model.max_chain))
        try:
            async with (
                draft,
                TargetClient(
                    self._targets,
                    model.model_digest,
                    traceparent,
                    wait_s,
                    arrived,
                    # Only a draft that grows ahead has anything for the round after.
                    speculation.next_round if grows_ahead else None,
                    wanted_self_draft_nodes if self_drafts else 0,
                ) as target,
                aclosing(decode(sequence, clock := RoundClock(target), speculation, controller)) as steps,
            ):

                def park() -> None:
                    """Release the replicas: the sequences of a client that does not read must hold no memory."""
                    self._metrics.parked()
                    target.park()
                    draft.park()

                if sequence.finished:
                    if sequence.lacks_prompt_logprobs:  # no round of a finished sample brings them
                        sequence.prompt_logprobs = await _prompt_logprobs(request, sequence, target)
                    await self._send_prompt(request, index, sequence, outbox, park, prompt_sent)
                    await outbox.put(Chunk.of(index, position, Piece(), sequence), park)
                async for step in steps:
                    record = step.record
                    split = clock.split(record)
                    if request.returns_prompt:
                        await self._send_prompt(request, index, sequence, outbox, park, prompt_sent)
                    if request.returns_rounds:
                        number = sequence.statistics.num_rounds - 1
                        report = RoundReport(index, number, record, split.draft, split.network + split.orchestrator)
                        await outbox.put(report, park)
                    self._metrics.round_ended(record, split, draft.tally)
                    if (answer := record.proposal.drafting.answer) is not None:
                        draft.compare(self._costs.of_one_s(*answer))
                    if span.is_recording():
                        span.add_event("round", _round_attributes(index, record, split))
                    if handed_over := bool(step.piece) or sequence.finished:
                        chunk = Chunk.of(index, position, step.piece, sequence)
                        clock.hands_over()
                        await outbox.put(chunk, park)
                        position += len(step.piece.token_ids)
                    if self._history is not None:
                        remembered = self._history.add(request.owner, sequence.ids, remembered)
                    if self._costs.target_known and self._metrics.look_due():
                        self._metrics.target_alone_s = self._costs.alone_s
                    clock.goes_on(handed_over)
        finally:
            if self._history is not None:
                self._history.add(request.owner, sequence.ids, remembered, ended=True)
            self._metrics.sample_ended(sequence.statistics)

    async def _send_prompt(
        self,
        request: Request,
        index: int,
        sequence: Sequence,
        outbox: Outbox,
        park: Callable[[], None],
        sent: asyncio.Event,
    ) -> None:
        """Send the prompt, if it is requested, with its logprobs, which the first sample has. The others wait."""
        if index and request.returns_prompt:
            await sent.wait()
        if sent.is_set() or not request.returns_prompt:
            return
        position, logprobs = 0, Logprobs.joined(sequence.prompt_logprobs)
        for piece in pieces_of(self._tokenizer, request.prompt_ids, request.skip_special_tokens, _PROMPT_PART):
            end = position + len(piece.token_ids)
            if request.num_prompt_logprobs is not None:
                piece = replace(piece, logprobs=logprobs.part(max(0, position - 1), end - 1))
            await outbox.put(PromptPart(position, piece), park)
            await asyncio.sleep(0)
            position = end
        sent.set()


async def _prompt_logprobs(request: Request, finished: Sequence, target: TargetClient) -> list[Logprobs]:
    """Those of the prompt alone, since the text of a finished sample may fill the context."""
    asked = finished.num_prompt_logprobs
    ids, sampling, salt = request.prompt_ids, SamplingParams(), request.cache_salt
    prompt = Sequence(ids, 1, sampling, 0, request.method, cache_salt=salt, num_prompt_logprobs=asked)
    await target.verify(prompt, EMPTY_TREE)
    return prompt.prompt_logprobs


def _round_attributes(index: int, record: RoundRecord, split: Split) -> dict[str, int]:
    """Microseconds and counts. Zeros are left out: each attribute costs 2 us. The target's span has the rows."""
    attributes = {"round": record.number, "base": record.base}
    if index:
        attributes["index"] = index
    if record.num_nodes:
        attributes["num_draft_tokens"] = record.num_nodes
        attributes["num_accepted_tokens"] = len(record.accepted)
    for part, name in _PARTS:
        if microseconds := int(getattr(split, part) * 1e6):
            attributes[name] = microseconds
    return attributes

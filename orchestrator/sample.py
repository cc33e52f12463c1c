"""One sample of a request: makes its parts, runs the loop over them, and reports every step to the client.

Knows the parts; does not know what the loop decides (orchestrator.decoder), deadlines and admission.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from opentelemetry import trace
from tokenizers import Tokenizer

from orchestrator.control.controller import Adaptive, Controller, Fixed
from orchestrator.control.cost_model import CostModel
from orchestrator.control.draft_length import DraftLength
from orchestrator.control.self_draft_length import SelfDraftLength
from orchestrator.decoder import Step, decode
from orchestrator.drafting.draft_client import DraftClient
from orchestrator.drafting.forced_tokens import ForcedTokens
from orchestrator.drafting.speculation import Speculation
from orchestrator.drafting.text_history import TextHistory
from orchestrator.outbox import Chunk, Event, Outbox, PromptPart, RoundReport
from orchestrator.replicas.pool import Pool
from orchestrator.request import OutputOptions, Request, Stops
from orchestrator.rounds import RoundRecord
from orchestrator.sequence import Sequence
from orchestrator.settings import OrchestratorSettings
from orchestrator.telemetry.metrics import Metrics
from orchestrator.telemetry.round_clock import PARTS, RoundClock, Split
from orchestrator.text import Piece, pieces_of
from orchestrator.verifying.target_client import TargetClient
from orchestrator.workers import Workers
from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.core.rounds import LOOKUP, Logprobs, ModelInfo
from specdec.core.sequence import Priority, SamplingParams
from specdec.core.tree import EMPTY_TREE
from specdec.speculation.acceptance import CallersAcceptance
from specdec.speculation.prompt_lookup import HitRates, PromptLookup
from specdec.telemetry import setup as telemetry

_IDS_PER_PROMPT_PART = 1024

_PARTS = [(part, f"{part.removeprefix('model_')}_us") for part in PARTS]


@dataclass(frozen=True, slots=True)
class Services:
    """What all samples of this orchestrator use."""

    targets: Pool
    drafts: Pool
    tokenizer: Tokenizer | None
    settings: OrchestratorSettings
    metrics: Metrics
    workers: Workers


class Experience:
    """What is learnt of all requests, the prior of the next one. Batch requests, which wait for passes and drafts where
    others do not, have their own; ``history`` is that of all."""

    def __init__(self, history: TextHistory | None) -> None:
        self.costs = CostModel()
        # By whether drafts grow ahead of the sequence: under token and block verification its rounds always wait.
        self.policies = [DraftLength(self.costs, MAX_DRAFT_TOKENS, ahead) for ahead in (False, True)]
        self.self_draft = SelfDraftLength(self.costs, MAX_DRAFT_TOKENS)
        self.self_lookup = SelfDraftLength(self.costs, MAX_DRAFT_TOKENS, looks_up=True)
        self.acceptance = CallersAcceptance()
        self.hit_rates = HitRates()
        self.history = history


@dataclass(frozen=True, slots=True)
class Answer:
    """What the samples of one request share. ``model``: of its targets. ``arrived``: when the request arrived
    (monotonic clock)."""

    request: Request
    model: ModelInfo
    arrived: float
    outbox: Outbox
    prompt_sent: asyncio.Event = field(default_factory=asyncio.Event)


class Sample:
    """The sample ``index`` of an answer. Create it in the task that runs it."""

    def __init__(
        self, sequence: Sequence, index: int, answer: Answer, services: Services, experience: Experience
    ) -> None:
        self._sequence = sequence
        self._index = index
        self._answer = answer
        self._request = answer.request
        self._tokenizer = services.tokenizer
        self._metrics = services.metrics
        self._experience = experience
        self._span = trace.get_current_span()
        self._park_after_s = services.settings.park_after_s
        self._position = len(answer.request.resume.get(index, ()))  # ids that the client has
        self._num_in_history = sequence.base  # see TextHistory.write
        model, num_ahead = answer.model, services.settings.num_ahead_tokens
        keyed, traceparent = sequence.keyed_by_token, telemetry.traceparent()
        grows_ahead, self_drafts = keyed and num_ahead > 0, keyed and bool(model.self_draft)
        looks_up = model.self_draft == LOOKUP
        num_siblings = 0 if model.max_chain else services.settings.num_siblings
        owner = self._request.caller.owner
        acceptance, lookup = experience.acceptance.of_text(owner), self._new_lookup()
        self._controller: Controller
        if (num_tokens := self._request.drafting.num_tokens) is not None:
            max_self_draft_nodes = num_tokens
            # By lookup not every text has self-drafts. So the tokens are a draft's, if there is one.
            self_drafts = self_drafts and not (looks_up and services.drafts.info)
            self._controller = Fixed(min(num_tokens, model.max_chain or num_tokens), experience.costs, self_drafts)
        else:
            self_draft = experience.self_lookup if looks_up else experience.self_draft
            max_self_draft_nodes = model.fixed_self_draft_nodes or self_draft.most
            self._controller = Adaptive(
                experience.policies[grows_ahead],
                acceptance,
                lookup,
                num_siblings=num_siblings,
                max_chain=model.max_chain,
                self_draft=self_draft if self_drafts else None,
                self_draft_nodes=model.fixed_self_draft_nodes,
                owner=owner,
            )
        self._draft = DraftClient(services.drafts, traceparent)
        self._speculation = Speculation(
            self._draft,
            max_ahead=num_ahead,
            max_siblings=num_siblings,
            chances=acceptance,
            lookup=lookup,
            chains=bool(model.max_chain),
        )
        self._target = TargetClient(
            services.targets,
            model_digest=model.model_digest,
            traceparent=traceparent,
            wait_s=services.settings.target_wait_s,
            arrived=answer.arrived,
            # Only a draft that grows ahead has anything for the round after.
            next_round=self._speculation.next_round if grows_ahead else None,
            wanted_self_draft_nodes=max_self_draft_nodes if self_drafts else 0,
        )
        self._clock = RoundClock(self._target)

    def _new_lookup(self) -> PromptLookup | ForcedTokens | None:
        drafting = self._request.drafting
        if drafting.num_tokens is not None or not self._sequence.keyed_by_token:
            return None
        lookup = PromptLookup(
            self._experience.hit_rates,
            prediction=drafting.prediction,
            others=self._experience.history,
            owner=self._request.caller.owner,
        )
        if drafting.grammar is None:
            return lookup
        return ForcedTokens(drafting.grammar, self._sequence.num_prompt_tokens, lookup)

    async def run(self) -> None:
        """Decode it to its end. Raises SpecdecError."""
        steps = decode(self._sequence, target=self._clock, speculation=self._speculation, controller=self._controller)
        try:
            async with self._draft, self._target, aclosing(steps):
                if self._sequence.finished:
                    await self._send_finished()
                    return
                async for step in steps:
                    await self._report(step)
        finally:
            self._add_to_history(ended=True)
            self._metrics.sample_ended(self._sequence.statistics)

    async def _report(self, step: Step) -> None:
        """Send what a step gave, and measure it."""
        record, split = step.record, self._clock.split(step.record)
        self._observe(record, split)
        self._clock.hands_over()
        await self._send_prompt()
        if self._request.output.rounds:
            report = RoundReport(
                index=self._index,
                number=self._sequence.statistics.num_rounds - 1,
                record=record,
                draft_wait_s=split.draft,
                path_s=split.network + split.orchestrator,
            )
            await self._send(report)
        if step.piece or self._sequence.finished:
            await self._send_chunk(step.piece)
        self._add_to_history()
        if self._experience.costs.target_known and self._metrics.poll_due():
            self._metrics.target_alone_s = self._experience.costs.alone_s
        self._clock.continues()

    def _observe(self, record: RoundRecord, split: Split) -> None:
        self._metrics.round_ended(record, split, self._draft.tally)
        if record.drafting.answer is not None and self._request.priority is not Priority.BATCH:
            self._draft.compare(self._experience.costs.of_one_s(*record.drafting.answer))
        if self._span.is_recording():
            self._span.add_event("round", _round_attributes(self._index, record, split))

    def _add_to_history(self, ended: bool = False) -> None:
        if (history := self._experience.history) is not None:
            self._num_in_history = history.write(
                self._request.caller.owner, self._sequence.ids, written=self._num_in_history, ended=ended
            )

    async def _send(self, event: Event) -> None:
        await self._answer.outbox.put(event, self._park)

    def _park(self) -> None:
        """Release the replicas: the sequences of a client that does not read must hold no memory."""
        self._metrics.parked()
        self._target.park()
        self._draft.park()

    async def _send_chunk(self, piece: Piece) -> None:
        chunk = Chunk.of(self._sequence, index=self._index, position=self._position, piece=piece)
        self._position += len(piece.token_ids)
        await self._send(chunk)

    async def _send_finished(self) -> None:
        """The answer of a sample that ended before it was resumed: no round brings its prompt's logprobs."""
        if self._sequence.lacks_prompt_logprobs:
            self._sequence.prompt_logprobs = await self._new_prompt_logprobs()
        await self._send_prompt()
        await self._send_chunk(Piece())

    async def _new_prompt_logprobs(self) -> list[Logprobs]:
        """Those of the prompt alone, since the text of a finished sample may fill the context."""
        request = replace(
            self._request,
            sampling=SamplingParams(),
            stops=Stops(max_tokens=1),
            output=OutputOptions(num_prompt_logprobs=self._sequence.num_prompt_logprobs),
            resume={},
        )
        sequence = Sequence(request)
        await self._target.verify(sequence, EMPTY_TREE)
        return sequence.prompt_logprobs

    async def _wait_for(self, sent: asyncio.Event) -> None:
        """After a while without the replicas: the first sample may need their memory, and the client may not read."""
        try:
            async with asyncio.timeout(self._park_after_s):
                await sent.wait()
        except TimeoutError:
            self._park()
            await sent.wait()

    async def _send_prompt(self) -> None:
        """Send the prompt, if it is requested, with its logprobs, which the first sample has. The others wait."""
        output, sent = self._request.output, self._answer.prompt_sent
        if not output.prompt:
            return
        if self._index:
            await self._wait_for(sent)
        if sent.is_set():
            return
        position, logprobs = 0, Logprobs.joined(self._sequence.prompt_logprobs)
        for piece in pieces_of(
            self._tokenizer,
            self._request.prompt_ids,
            skip_special_tokens=output.skip_special_tokens,
            num_ids=_IDS_PER_PROMPT_PART,
        ):
            end = position + len(piece.token_ids)
            if output.num_prompt_logprobs is not None:
                piece = replace(piece, logprobs=logprobs.part(max(0, position - 1), end - 1))
            await self._send(PromptPart(position, piece))
            await asyncio.sleep(0)
            position = end
        sent.set()


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

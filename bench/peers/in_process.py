"""Our loop in one process: orchestrator.decoder drives the two engines directly, without gRPC or other threads, and
almost without asyncio. The difference from the services is the cost of their round trips.

Knows both engines; does not handle failures.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from bench.models.damped_pair import Pair
from bench.peers.contender import THREADS, Contender, Kind, Prompts, Run, Settings
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.engine import DraftEngine, DraftOpen
from orchestrator.control.controller import Fixed
from orchestrator.decoder import decode
from orchestrator.drafting.draft_client import DraftClient
from orchestrator.drafting.speculation import Speculation
from orchestrator.rounds import Exchange, Proposal, RoundPlan, RoundRecord
from orchestrator.sequence import Sequence as Sample
from specdec.core.errors import SpecdecError
from specdec.core.rounds import Advance, Budget, Growth, Round, TargetOpen, Verdict
from specdec.core.sequence import Method, SamplingParams
from specdec.core.settings import ModelServiceSettings
from specdec.core.tree import TokenTree
from specdec.runner.loading import load_runner
from specdec.runner.model_runner import ModelRunner
from specdec.server.step_loop import Engine, Key
from target_service.engine import TargetEngine
from target_service.language_model import LmVerifier


class InProcess:
    """Both engines, built like in the services."""

    def __init__(
        self, pair: Pair, dtype: str, num_draft_tokens: Sequence[int], threads: Sequence[int] = THREADS
    ) -> None:
        self.target_runner = _runner(pair.target, dtype)
        self._target = TargetEngine(LmVerifier(self.target_runner))
        self._draft = DraftEngine(LanguageModelDrafter(_runner(pair.draft, dtype)))
        self._keys = (Key(0, number) for number in itertools.count())
        self._threads = [(count,) for count in threads]
        self._num_draft_tokens = num_draft_tokens

    def contenders(self) -> list[Contender]:
        return [
            Contender(Kind.LOOP_ALONE, 1, self._run, self._threads),
            Contender(Kind.LOOP, 1, self._run, self._threads, self._num_draft_tokens),
        ]

    async def _run(self, settings: Settings, prompts: Prompts, max_tokens: int) -> Run:
        torch.set_num_threads(settings.threads[0])
        started = time.perf_counter()
        outputs = [await self._generate(prompt, max_tokens, settings.num_draft_tokens or 0) for prompt in prompts]
        return Run(time.perf_counter() - started, outputs)

    async def _generate(self, prompt: list[int], max_tokens: int, num_draft_tokens: int) -> list[int]:
        end = frozenset(self.target_runner.info.eos_token_ids)
        key = next(self._keys)
        # A later run of the same prompt must not find its prefix in the KV cache.
        salt = str(key).encode()
        sequence = Sample(prompt, max_tokens, SamplingParams(0.0), 0, Method.COUPLED, end, cache_salt=salt)
        target, draft = _Target(self._target, key), _Draft(self._draft, key)
        speculation = Speculation(cast(DraftClient, draft))
        output: list[int] = []
        try:
            async for step in decode(sequence, target, speculation, Fixed(num_draft_tokens)):
                output.extend(step.piece.token_ids)
        finally:
            self._target.close(key)
            self._draft.close(key)
        return output


class _Target:
    """See orchestrator.decoder.Target."""

    def __init__(self, engine: TargetEngine, key: Key) -> None:
        self._engine = engine
        self._key = key
        self._round = -1

    async def verify(self, sequence: Sample, proposal: Proposal, plan: RoundPlan) -> tuple[Verdict, RoundRecord]:
        self._round += 1
        if self._round == 0:
            self._engine.open(self._key, TargetOpen(sequence.spec, sequence.stop_token_ids))
        else:
            self._engine.submit(self._key, Round(self._round, sequence.base, proposal.tree))
        verdict: Verdict = _answer(self._engine, self._key)
        return verdict, RoundRecord.of(proposal, verdict, Exchange())


class _Draft:
    """The part of orchestrator.drafting.draft_client.DraftClient that Speculation uses."""

    def __init__(self, engine: DraftEngine, key: Key) -> None:
        self._engine = engine
        self._key = key
        self._base = 0
        self.num_advances = -1

    def advance(self, sequence: Sample, budget: Budget, in_flight: TokenTree, num_there: int) -> bool:
        self.num_advances += 1
        if self.num_advances == 0:
            self._engine.open(self._key, DraftOpen(sequence.spec, budget))
        else:
            new = tuple(sequence.ids[self._base :])
            self._engine.submit(self._key, Advance(self.num_advances, sequence.base, new, budget=budget))
        self._base = sequence.base
        return True

    def arrived(self) -> list[Growth]:
        return []

    def catch_up(self, sequence: Sample) -> None:
        """Nothing to do: the next advance has all new ids."""

    async def growth(self, sequence: Sample, deadline_s: float, waited_s: float = 0.0) -> Growth | None:
        growth: Growth = _answer(self._engine, self._key)
        return growth

    def take_answer(self) -> None:
        pass

    def eject(self, reason: str) -> None:
        raise RuntimeError(f"the draft broke the contract: {reason}")


def _answer(engine: Engine, key: Key) -> Any:
    """Run passes until this sequence has its result. Raises the SpecdecError that ended it."""
    while True:
        for answered, result in engine.step():
            if answered == key:
                if isinstance(result, SpecdecError):
                    raise result
                return result


def _runner(directory: Path, dtype: str) -> ModelRunner:
    settings = {"model": str(directory), "dtype": dtype, "kv_slots": 8192}
    return load_runner(ModelServiceSettings.model_validate(settings))

"""A deployment on paper: tokens per second, load and the best number of draft tokens, as a closed form.

Knows pass times, distances and acceptance; does not know how they were measured. The sequences of a target share its
passes, draft equally many tokens and return together, as the policy has them do. A draft works for all at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specdec.planner.pass_time import PassTime
from specdec.speculation.acceptance import PRIOR
from specdec.speculation.cost import Round, ahead_round, chain_chances, expected_tokens

NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
"""Of draft tokens that are compared."""

CHUNK_ROWS = 512
"""Prompt tokens of a pass."""

ENOUGH_DRAFTS, ENOUGH = 2, 0.95
"""So many drafts per target are assumed to be more than enough. Fewer are enough at this share of their speed."""

ALIKE = 0.95
"""Of settings that reach this share of the best speed, the one that drafts least is chosen."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft. A row of the draft's step is a sequence. ``acceptance`` is per draft token. ``runner_up``
    is the probability that a correction is the draft's second guess, 1/3 with real pairs (bench/LOG.md, 2026-11-22)."""

    target: PassTime
    draft: PassTime
    acceptance: float
    runner_up: float = PRIOR[1]


@dataclass(frozen=True, slots=True)
class Paths:
    """The network. ``round_trip_s`` is between orchestrator and draft; the target is next to the orchestrator.
    ``overhead_s`` is the RPC overhead of an exchange with either; ``work_s`` the orchestrator's CPU time per answer."""

    round_trip_s: float = 0.0
    overhead_s: float = 0.0
    work_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """``requests`` are in progress per target at any time. Lengths are in tokens."""

    requests: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Drafting:
    """``num_draft_tokens`` per round (K; 0: the target decodes autonomously). ``ahead``: the draft grows meanwhile."""

    num_draft_tokens: int = 0
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates of all requests together; ``ms_per_token`` and ``request_s`` of one. Loads are shares of the time."""

    tokens_per_s: float
    requests_per_s: float
    ms_per_token: float
    request_s: float
    target_load: float
    draft_load: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """Each target has one orchestrator."""

    pair: Pair
    paths: Paths
    workload: Workload
    targets: int = 1
    drafts: int = 1

    def speed(self, drafting: Drafting) -> Speed:
        """The speed with so many draft tokens in every round."""
        work, num_tokens = self.workload, drafting.num_draft_tokens
        tokens = expected_tokens(chain_chances([self.pair.acceptance]), num_tokens)[num_tokens]
        chunks = math.ceil(work.prompt / CHUNK_ROWS)
        pass_s = self._pass_s(num_tokens, chunks, (work.output - 1) / tokens)
        mean = self._round(drafting, tokens, pass_s)
        request_s = (chunks + (work.output - 1) / mean.tokens) * mean.seconds  # the first token follows from the prompt
        requests_per_s = work.requests * self.targets / request_s
        return Speed(
            tokens_per_s=requests_per_s * work.output,
            requests_per_s=requests_per_s,
            ms_per_token=1e3 / mean.tokens_per_s,
            request_s=request_s,
            target_load=pass_s / mean.seconds,
            draft_load=self._draft_load(drafting, mean.seconds),
        )

    def _pass_s(self, num_tokens: int, chunks: int, rounds: float) -> float:
        """The mean time of a pass. A request is in ``chunks`` passes with its prompt, then in so many ``rounds``."""
        work, pass_s = self.workload, self.pair.target.seconds
        decoding = work.requests * (1 + num_tokens) * rounds / (chunks + rounds)
        num_chunks = work.requests * chunks / (chunks + rounds)  # of a pass
        with_prompts = min(1.0, num_chunks)
        prompt_rows = num_chunks / with_prompts * work.prompt / chunks
        return (1 - with_prompts) * pass_s(decoding) + with_prompts * pass_s(decoding + prompt_rows)

    def _round(self, drafting: Drafting, tokens: float, pass_s: float) -> Round:
        """The mean round. One that does not wait for its draft gives ``tokens``."""
        paths, num_tokens, num_sequences = self.paths, drafting.num_draft_tokens, self.workload.requests
        work_s = num_sequences * paths.work_s
        if not num_tokens:
            return Round(1.0, max(pass_s, work_s))  # autonomous: no exchange is waited for
        exchange_s = paths.overhead_s + work_s
        drafted = Round(tokens, pass_s + exchange_s)
        step_s = self.pair.draft.seconds(num_sequences * self.targets / self.drafts)
        begun_s = step_s / 2 if self.targets > self.drafts else 0.0  # a step for other targets ends first
        draft_s = num_tokens * step_s + begun_s + paths.round_trip_s + exchange_s
        if not drafting.ahead or drafted.seconds < 2 * step_s:  # no time to grow anything
            return Round(tokens, drafted.seconds + draft_s)
        acceptance = self.pair.acceptance
        right = acceptance ** (num_tokens + 1)
        return ahead_round(
            drafted,
            draft_s,
            hit_rate=right + (1 - right) * self.pair.runner_up,
            # Measured: several sequences gain nothing by continuing, as they wait for each other's passes.
            first_rate=acceptance if num_sequences == 1 else 0.0,
            num_late=1 + int(paths.round_trip_s / drafted.seconds),
            num_sequences=num_sequences,
        )

    def _draft_load(self, drafting: Drafting, round_s: float) -> float:
        """At most, as if no two targets shared a step."""
        if drafting.ahead:
            return 1.0  # it grows whenever no sequence waits
        steps_s = drafting.num_draft_tokens * self.pair.draft.seconds(self.workload.requests)
        return min(1.0, steps_s * max(1.0, self.targets / self.drafts) / round_s)

    def speeds(self) -> dict[Drafting, Speed]:
        """All settings that are compared: those that draft less first, and those that wait for the draft."""
        settings = [Drafting(), *(Drafting(number, ahead) for ahead in (False, True) for number in NUMBERS)]
        return {drafting: self.speed(drafting) for drafting in settings}

    def best(self) -> Drafting:
        speeds = self.speeds()
        enough = ALIKE * max(speed.tokens_per_s for speed in speeds.values())
        return next(drafting for drafting, speed in speeds.items() if speed.tokens_per_s >= enough)

    def with_fewest_drafts(self) -> Deployment:
        """This deployment with the smallest number of drafts that is enough."""
        plenty = replace(self, drafts=ENOUGH_DRAFTS * self.targets)
        drafting = plenty.best()
        enough = ENOUGH * plenty.speed(drafting).tokens_per_s
        sizes = (replace(self, drafts=drafts) for drafts in range(1, plenty.drafts + 1))
        return next(size for size in sizes if size.speed(drafting).tokens_per_s >= enough)

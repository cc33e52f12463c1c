"""The whole comparison in order: calibration, then contenders in turns.

Knows what is measured and how often; does not know how the contenders work and how results are shown.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from bench.models.damped_pair import Pair
from bench.peers.calibration import calibrate
from bench.peers.contender import ADAPTIVE, THREADS, Contender, Kind, Settings
from bench.peers.in_process import InProcess
from bench.peers.measuring import Row, take_turns
from bench.peers.prompts import PromptSource
from bench.peers.ratios import BATCHES
from bench.peers.services import Services
from bench.peers.transformers_peers import TransformersPair

_OUR_DRAFT_TOKENS = (4, 6, 8)
_TEXTS = 3
"""Texts per repetition and calibration with one request at a time. The acceptance of texts can differ by a factor of
two, which only a batch averages out."""
_PROMPT_TOKENS = 64

_MAX_FEW_STREAMS = 4
"""Up to this many concurrent requests get more tokens each, because a fifth of the time of 48 tokens is prefill. More
requests with as many tokens would take too long."""

_QUICK_LIMIT_S, _QUICK_TOKENS_PER_S = 120.0, 16.0
"""The time limit of a quick run, and the speed of generate at which it has its full number of tokens."""

_PROBE_TOKENS = 8


class Section(StrEnum):
    single = "single"
    batch = "batch"


@dataclass(frozen=True, slots=True)
class Plan:
    """The amount of measurement. The ``*_tokens`` are output tokens per request."""

    sections: Sequence[Section]
    streams: Sequence[int]  # of the batches
    repeats: int
    texts: int  # per repetition, one after the other, with one request at a time
    single_tokens: int
    batch_tokens: int
    few_tokens: int  # in small batches
    calibration_tokens: int
    batch_calibration_tokens: int
    thorough: bool  # see calibrate
    learning: int
    """Warm-up runs of an adaptive contender, because a server in use has already learnt what pays."""
    num_compared: int
    """Outputs per batch and repetition that are compared with generate's; each of them costs one generate."""
    threads: Sequence[int]
    ahead: Sequence[bool]  # of our services: whether the draft grows ahead
    limit_s: float = math.inf
    """Batches that are expected to exceed this time in total are left out."""

    @staticmethod
    def of(
        quick: bool,
        repeats: int,
        only: Sequence[Section] | None,
        streams: Sequence[int] | None,
        threads: Sequence[int] | None,
    ) -> Plan:
        """The plan for the command-line flags. None means the full choice."""
        full = Plan(
            sections=only or tuple(Section),
            streams=streams or BATCHES,
            repeats=repeats,
            texts=_TEXTS,
            single_tokens=128,
            batch_tokens=48,
            few_tokens=128,
            calibration_tokens=48,
            batch_calibration_tokens=24,
            thorough=True,
            learning=2,
            num_compared=2,
            threads=threads or THREADS,
            ahead=(False, True),
        )
        if not quick:
            return full
        return replace(
            full,
            repeats=1,
            texts=1,
            single_tokens=48,
            batch_tokens=24,
            few_tokens=24,
            calibration_tokens=24,
            batch_calibration_tokens=8,
            thorough=False,
            learning=0,
            num_compared=1,
            # Every number of threads needs its own set of services, which starts more slowly than its runs take.
            threads=threads or THREADS[-1:],
            ahead=(False,),
            limit_s=_QUICK_LIMIT_S,
        )

    def fitting(self, tokens_per_s: float) -> Plan:
        """The plan for a machine with this speed of generate: a quick plan has fewer tokens on a slow machine."""
        if math.isinf(self.limit_s):
            return self
        share = min(1.0, tokens_per_s / _QUICK_TOKENS_PER_S)
        return replace(
            self,
            single_tokens=max(24, int(share * self.single_tokens)),
            batch_tokens=max(8, int(share * self.batch_tokens)),
            few_tokens=max(8, int(share * self.few_tokens)),
            calibration_tokens=max(10, int(share * self.calibration_tokens)),
            batch_calibration_tokens=max(4, int(share * self.batch_calibration_tokens)),
        )


@dataclass(slots=True)
class Comparison:
    """All results."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)  # streams that did not fit into the time limit
    acceptance: float = 0.0  # of the draft's first token, over greedy outputs of the target
    load: float = 0.0  # load average of the machine before the start: other work affects every figure

    def as_dict(self) -> dict[str, Any]:
        return {
            "load_average": self.load,
            "acceptance": self.acceptance,
            "contenders": [
                {
                    "name": str(row.kind),
                    "streams": row.streams,
                    "tokens_per_s": row.tokens_per_s,
                    "threads": row.settings.threads,
                    "num_draft_tokens": row.settings.num_draft_tokens,
                    "ahead": row.settings.ahead,
                    "identical": row.identical,
                    "compared": row.compared,
                    "runs": [{"tokens_per_s": run.tokens_per_s, **run.figures} for run in row.runs],
                }
                for row in self.rows
            ],
            "streams_left_out": self.left_out,
        }


async def compare(
    pair: Pair,
    dtype: str,
    services: Services,
    prompts: PromptSource,
    plan: Plan,
    report: Callable[[str], None],
    show: Callable[[str], None],
) -> Comparison:
    """Measure everything in ``plan``. ``report`` gets the progress, ``show`` the intermediate results."""
    started = time.monotonic()
    result = Comparison(load=os.getloadavg()[0])
    report("Loading the models")
    theirs = TransformersPair(pair, dtype, plan.threads)
    ours = InProcess(pair, dtype, _OUR_DRAFT_TOKENS, plan.threads)
    generate, *_ = theirs.contenders(1)
    first_guess = Settings(generate.threads[0], generate.num_draft_tokens[0])
    plan = plan.fitting((await generate.run(first_guess, prompts.take(1, _PROMPT_TOKENS), _PROBE_TOKENS)).tokens_per_s)
    alone = await _calibrated(generate, prompts, plan, report, show)

    async def reference(prompt: list[int], max_tokens: int) -> list[int]:
        return list((await generate.run(alone, [prompt], max_tokens)).outputs[0])

    sample = prompts.take(2, _PROMPT_TOKENS)
    outputs = [await reference(prompt, plan.single_tokens) for prompt in sample]
    result.acceptance = theirs.acceptance(sample, outputs)
    show(f"greedy acceptance of the draft's first token: {result.acceptance:.2f}")

    async def turns(contenders: Sequence[Contender], repeats: int, max_tokens: int) -> None:
        settings = [
            alone if each.kind is Kind.GENERATE else await _calibrated(each, prompts, plan, report, show)
            for each in contenders
        ]
        for each, chosen in zip(contenders, settings, strict=True):
            if chosen.num_draft_tokens == ADAPTIVE:
                for _ in range(plan.learning):
                    report(f"{each.name}: warm-up")
                    await each.run(chosen, prompts.take(each.streams, _PROMPT_TOKENS), max_tokens)
        result.rows += await take_turns(
            list(zip(contenders, settings, strict=True)),
            prompts,
            reference,
            prompt_length=_PROMPT_TOKENS,
            max_tokens=max_tokens,
            repeats=repeats,
            num_compared=plan.num_compared,
            report=report,
        )

    if Section.single in plan.sections:
        contenders = [
            *theirs.contenders(1),
            *ours.contenders(),
            *services.contenders(1, (*_OUR_DRAFT_TOKENS, ADAPTIVE), plan.ahead),
        ]
        await turns(contenders, plan.repeats * plan.texts, plan.single_tokens)
    if Section.batch in plan.sections:
        before_s, before = 0.0, 1
        for streams in plan.streams:
            begun = time.monotonic()
            # A batch is mostly prefill, so its time grows in proportion to the number of streams.
            if begun - started + before_s * streams / before > plan.limit_s:
                result.left_out.append(streams)
                show(f"{streams} at a time: left out because of the time limit")
                continue
            contenders = [*theirs.contenders(streams), *services.contenders(streams, (ADAPTIVE,), plan.ahead)]
            await turns(contenders, plan.repeats, plan.few_tokens if streams <= _MAX_FEW_STREAMS else plan.batch_tokens)
            before_s, before = time.monotonic() - begun, streams
    return result


async def _calibrated(
    contender: Contender,
    prompts: PromptSource,
    plan: Plan,
    report: Callable[[str], None],
    show: Callable[[str], None],
) -> Settings:
    single = contender.streams == 1
    texts = [prompts.take(contender.streams, _PROMPT_TOKENS) for _ in range(plan.texts if single else 1)]
    max_tokens = plan.calibration_tokens if single else plan.batch_calibration_tokens
    settings = await calibrate(contender, texts, max_tokens, report, plan.thorough)
    show(f"{contender.name}: best with {settings}")
    return settings

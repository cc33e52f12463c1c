"""Texts of the services with vLLM on both sides, beside those of engine torch and of transformers.

Requests run together, each with a number of draft tokens of its own, and some are given up half-way. Where a text
differs, the two best tokens must have been nearly tied, by the scores of transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.engines.serving import serving
from bench.harness.command import Common
from bench.harness.deployment import Processes
from bench.harness.methods import Method
from bench.harness.models import Models
from bench.peers import TransformersPair
from specdec.client import Client
from specdec.core.noise import Domain, Key, exponentials

NEAR_TIE = 1e-3
MAX_DIVERGENCES_PER_TOKEN = 1e-3
_TOGETHER = 8
_MAX_DRAFT_TOKENS = 8
_GIVEN_UP = 0.2
_LONGEST_WAIT_S = 1.0

Texts = Mapping["Case", list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """A request: greedy, or drawn at temperature 1."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float

    def fields(self, max_tokens: int, num_draft_tokens: int) -> dict[str, Any]:
        ids = {"token_ids": {"token_ids": self.prompt}}
        asked = {"max_tokens": max_tokens, "num_draft_tokens": num_draft_tokens}
        return ids | asked | {"seed": self.seed, "temperature": self.temperature}


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of a text. ``gap``: how much less than the best the worse of both tokens scores."""

    other: str
    case: Case
    position: int
    gap: float

    def __str__(self) -> str:
        how = f"seed {self.case.seed}" if self.case.temperature else "greedy"
        return f"unlike {self.other}, {how}, output position {self.position}: gap {self.gap:.2g}"


@dataclass(frozen=True, slots=True)
class Parity:
    num_tokens: int  # compared, over both references
    num_texts: int
    num_given_up: int
    num_drafted: int
    num_accepted: int
    divergences: Sequence[Divergence]

    @property
    def holds(self) -> bool:
        few = len(self.divergences) <= MAX_DIVERGENCES_PER_TOKEN * self.num_tokens
        return few and all(each.gap < NEAR_TIE for each in self.divergences)

    def __str__(self) -> str:
        compared = f"{self.num_tokens} tokens of {self.num_texts} texts compared"
        beside = (
            f"{self.num_accepted} of {self.num_drafted} draft tokens accepted, {self.num_given_up} requests given up"
        )
        return f"{compared}; {beside}; {len(self.divergences)} divergences: {'holds' if self.holds else 'BROKEN'}"


class Reference:
    """The target as transformers runs it."""

    def __init__(self, target: str) -> None:
        self._loaded = TransformersPair(target, None, "float32")

    @torch.inference_mode()
    def greedy(self, cases: Sequence[Case], max_tokens: int) -> Texts:
        texts = self._loaded.generate([list(case.prompt) for case in cases], max_tokens)
        return dict(zip(cases, texts, strict=True))

    @torch.inference_mode()
    def gap(self, case: Case, text: Sequence[int], tokens: Sequence[int | None]) -> float:
        """How much less than the best the worst of ``tokens`` scores after ``text``. None: the end of the text."""
        ids = torch.tensor([[*case.prompt, *text]])
        scores = self._loaded.target(input_ids=ids, logits_to_keep=1).logits[0, -1].double()  # [vocab]
        if case.temperature:
            noise = exponentials([Key(case.seed, ids.shape[1])], Domain.COUPLED, len(scores))[0]
            scores = scores / case.temperature - noise.log()
        ends = self._loaded.end_token_ids
        of_tokens = [scores[ends if token is None else token].max() for token in tokens]
        return float(scores.max() - min(of_tokens))


async def measure(
    models: Models, common: Common, prompts: Sequence[list[int]], max_tokens: int, report: Callable[[str], object]
) -> Parity:
    """``prompts`` are equally long. Raises StartError."""
    cases = [Case(tuple(prompt), seed, t) for seed, prompt in enumerate(prompts) for t in (0.0, 1.0)]
    report("texts of transformers")
    reference = await asyncio.to_thread(Reference, models.target)
    greedy = [case for case in cases if not case.temperature]
    references: dict[str, Texts] = {
        "transformers": {
            case: text
            for start in range(0, len(greedy), _TOGETHER)
            for case, text in reference.greedy(greedy[start : start + _TOGETHER], max_tokens).items()
        }
    }
    report("texts of engine torch")
    async with Processes() as processes:
        _, client = await serving(processes, common, models.target, "torch").start(Method())
        references["engine torch"] = await _Load(client, max_tokens).texts(cases)
    report("texts of engine vllm")
    async with Processes() as processes:
        _, client = await serving(processes, common, models.target, "vllm").start(Method(draft=models.draft))
        load = _Load(client, max_tokens, random.Random(1))
        texts = await load.texts(cases)
    return Parity(
        sum(len(text) for expected in references.values() for text in expected.values()),
        len(cases),
        load.num_given_up,
        load.num_drafted,
        load.num_accepted,
        [each for name, expected in references.items() for each in divergences(name, expected, texts, reference)],
    )


class _Load:
    """Some requests at a time. Without ``chance`` the target is alone, and no request is given up."""

    def __init__(self, client: Client, max_tokens: int, chance: random.Random | None = None) -> None:
        self._client, self._max_tokens, self._chance = client, max_tokens, chance
        self._gate = asyncio.Semaphore(_TOGETHER)
        self.num_given_up = self.num_drafted = self.num_accepted = 0

    async def texts(self, cases: Sequence[Case]) -> Texts:
        return dict(zip(cases, await asyncio.gather(*map(self._one, cases)), strict=True))

    async def _one(self, case: Case) -> list[int]:
        async with self._gate:
            num_draft_tokens = 0
            if self._chance:
                num_draft_tokens = self._chance.randint(0, _MAX_DRAFT_TOKENS)
                if self._chance.random() < _GIVEN_UP:
                    await self._give_up(case, num_draft_tokens, self._chance.random() * _LONGEST_WAIT_S)
            [sample] = await self._client.generate(**case.fields(self._max_tokens, num_draft_tokens))
        self.num_drafted += sample.finish.speculation.num_draft_tokens
        self.num_accepted += sample.finish.speculation.num_accepted_tokens
        return list(sample.token_ids)

    async def _give_up(self, case: Case, num_draft_tokens: int, after_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            request = self._client.generate(**case.fields(self._max_tokens, num_draft_tokens))
            await asyncio.wait_for(request, after_s)
            return
        self.num_given_up += 1


def divergences(name: str, expected: Texts, texts: Texts, reference: Reference) -> list[Divergence]:
    """The first difference of each of the ``texts`` from the one that is ``expected``."""
    differing = []
    for case, text in expected.items():
        if texts[case] == text:
            continue
        pairs = zip([*text, None], [*texts[case], None], strict=False)
        at, tokens = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        differing.append(Divergence(name, case, at, reference.gap(case, text[:at], tokens)))
    return differing

"""Texts of the services on vLLM next to those of engine torch, and of transformers where they are greedy.

Prompts are asked together, with several numbers of draft tokens. Where a text differs, the two first different tokens
must have been nearly tied, by the scores of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import torch

from bench.engines.comparisons import serving
from bench.harness.command import Common
from bench.harness.deployment import Processes
from bench.harness.methods import Method
from bench.harness.models import Models
from bench.harness.runner import Ask, Request
from bench.peers import TransformersPair
from specdec.core.noise import Domain, Key, exponentials

NEAR_TIE = 1e-3
MAX_DIVERGENCES_PER_TOKEN = 1e-3
_TOGETHER = 8
_NUM_DRAFT_TOKENS = (0, 1, 4, 8)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of a text. ``gap``: how much less than the best the worse of both tokens scores."""

    contender: str
    other: str
    temperature: float
    position: int
    gap: float

    def __str__(self) -> str:
        where = f"T = {self.temperature:g}, output position {self.position}"
        return f"{self.contender}, unlike {self.other}: {where}: gap {self.gap:.2g}"


@dataclass(frozen=True, slots=True)
class Parity:
    num_tokens: int  # compared
    num_texts: int
    divergences: Sequence[Divergence]

    @property
    def holds(self) -> bool:
        are_few = len(self.divergences) <= MAX_DIVERGENCES_PER_TOKEN * self.num_tokens
        return are_few and all(divergence.gap < NEAR_TIE for divergence in self.divergences)

    def __str__(self) -> str:
        compared = f"{self.num_tokens} tokens of {self.num_texts} texts compared"
        return f"{compared}; {len(self.divergences)} divergences: {'holds' if self.holds else 'BROKEN'}"


class Reference:
    """The target as transformers runs it."""

    def __init__(self, target: str) -> None:
        self._loaded = TransformersPair(target, None, "float32")

    def greedy(self, request: Request) -> list[list[int]]:
        return self._loaded.generate([_ids(prompt) for prompt in request.prompts], request.max_tokens)

    @torch.inference_mode()
    def gap(self, request: Request, index: int, text: Sequence[int], tokens: Sequence[int | None]) -> float:
        """How much less than the best the worst of ``tokens`` scores, behind ``text`` of the request's prompt with this
        index. None: the end of the text."""
        ids = torch.tensor([[*_ids(request.prompts[index]), *text]])
        scores = self._loaded.target(input_ids=ids, logits_to_keep=1).logits[0, -1].double()  # [vocab]
        if request.temperature:
            noise = exponentials([Key(request.seed + index, ids.shape[1])], Domain.COUPLED, len(scores))[0]
            scores = scores / request.temperature - noise.log()
        ends = self._loaded.end_token_ids
        return float(scores.max() - min(scores[ends if token is None else token].max() for token in tokens))


def _ids(prompt: Mapping[str, Any]) -> list[int]:
    return list(prompt["token_ids"]["token_ids"])


def first_difference(text: Sequence[int], other: Sequence[int]) -> tuple[int, tuple[int | None, int | None]] | None:
    """Its position and both tokens (None: an end); None if there is none."""
    pairs = zip([*text, None], [*other, None], strict=False)
    return next(((index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1]), None)


async def compare_texts(asks: Mapping[str, Ask], requests: Sequence[Request], reference: Reference) -> Parity:
    """The first of ``asks`` is what the others are compared with."""
    (first, ask_first), *others = asks.items()
    num_tokens, divergences = 0, []
    for request in requests:
        expected = {first: [answer.token_ids for answer in (await ask_first(request)).answers]}
        if not request.temperature:
            expected["transformers"] = reference.greedy(request)
        for name, ask in others:
            texts = [answer.token_ids for answer in (await ask(request)).answers]
            for other, of_other in expected.items():
                for index, (text, wanted) in enumerate(zip(texts, of_other, strict=True)):
                    num_tokens += len(wanted)
                    if difference := first_difference(text, wanted):
                        position, tokens = difference
                        gap = reference.gap(request, index, wanted[:position], tokens)
                        divergences.append(Divergence(name, other, request.temperature, position, gap))
    num_texts = len(others) * sum(len(request.prompts) for request in requests)
    return Parity(num_tokens, num_texts, divergences)


async def measure(models: Models, common: Common, prompts: Sequence[list[int]], max_tokens: int) -> Parity:
    """``prompts`` are equally long; each is asked greedily and drawn. Raises StartError."""
    requests = [
        Request(
            [{"token_ids": {"token_ids": ids}} for ids in prompts[start : start + _TOGETHER]], max_tokens, t, start, ""
        )
        for start in range(0, len(prompts), _TOGETHER)
        for t in (0.0, 1.0)
    ]
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(Processes())
        of_torch = await serving(processes, common, models.target, "torch").endpoint(Method())
        of_vllm = await serving(processes, common, models.target, "vllm").endpoint(Method(draft=models.draft))
        asks = {"engine torch": of_torch.asks(num_draft_tokens=0)}
        asks |= {f"engine vllm, K = {number}": of_vllm.asks(num_draft_tokens=number) for number in _NUM_DRAFT_TOKENS}
        return await compare_texts(asks, requests, Reference(models.target))

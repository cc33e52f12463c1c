"""Our three services as separate processes over gRPC, as a client of the orchestrator sees them.

Every model service runs once per thread count, with two orchestrators for each target; unused processes are idle.
Knows processes and requests; does not know models.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from bench.harness.deployment import Processes
from bench.models.damped_pair import Pair
from bench.peers.contender import ADAPTIVE, THREADS, Contender, Kind, Prompts, Run, Settings
from specdec.client import Client, Sample
from specdec.v1.generation_pb2 import SpeculationStats

_KV_SLOTS = 16384
"""More than any run needs. By default, the services of every thread count would together reserve too much memory."""

_AHEAD_TOKENS = 60


class Services:
    """Running services; see ``running``."""

    def __init__(self, clients: dict[tuple[tuple[int, ...], bool], Client]) -> None:
        """``clients`` is keyed by the threads of target and draft, and by whether the draft grows ahead."""
        self._clients = clients
        self._numbers = itertools.count()

    @property
    def threads(self) -> list[tuple[int, ...]]:
        """The available combinations of threads of target and draft."""
        return list(dict.fromkeys(threads for threads, _ in self._clients))

    def contenders(
        self, streams: int, num_draft_tokens: Sequence[int], ahead: Sequence[bool] = (False,)
    ) -> list[Contender]:
        return [
            Contender(Kind.ALONE, streams, self._run, self.threads),
            Contender(Kind.OURS, streams, self._run, self.threads, num_draft_tokens, ahead),
        ]

    async def _run(self, settings: Settings, prompts: Prompts, max_tokens: int) -> Run:
        started = time.perf_counter()
        samples = await asyncio.gather(*(self.answer(settings, prompt, max_tokens) for prompt in prompts))
        seconds = time.perf_counter() - started
        figures = figures_of([sample.finish.speculation for sample in samples])
        return Run(seconds, [sample.token_ids for sample in samples], figures)

    async def answer(self, settings: Settings, prompt: list[int], max_tokens: int) -> Sample:
        """The answer to one request."""
        request: dict[str, Any] = {"token_ids": {"token_ids": prompt}, "max_tokens": max_tokens, "temperature": 0.0}
        # Without a salt a service would reuse the prefixes of earlier requests, and transformers would not.
        request["cache_salt"] = f"salt {next(self._numbers)}"
        if settings.num_draft_tokens != ADAPTIVE:
            request["num_draft_tokens"] = settings.num_draft_tokens or 0
        [sample] = await self._clients[settings.threads, settings.ahead].generate(**request)
        return sample


def figures_of(told: Sequence[SpeculationStats]) -> dict[str, float]:
    """Figures of concurrent samples. Prompt-lookup tokens are not the draft's work, so they are counted separately."""

    def total(count: Callable[[SpeculationStats], int]) -> int:
        return sum(map(count, told))

    # The first round of each sample, the prefill, verifies nothing.
    rounds = total(lambda each: each.num_rounds - 1)
    drafted = total(lambda each: each.num_draft_tokens - each.num_lookup_tokens)
    accepted = total(lambda each: each.num_accepted_tokens - each.num_accepted_lookup_tokens)
    return {
        "mean_draft_tokens": drafted / rounds if rounds else 0.0,
        "acceptance": accepted / drafted if drafted else 0.0,
        "mean_lookup_tokens": total(lambda each: each.num_lookup_tokens) / rounds if rounds else 0.0,
        "replays": float(total(lambda each: each.num_replays)),
    }


@asynccontextmanager
async def running(pair: Pair, dtype: str, threads: Sequence[int] = THREADS) -> AsyncIterator[Services]:
    """Healthy, connected services with each of ``threads`` per model. Raises StartError."""
    async with Processes() as made:
        addresses: dict[tuple[str, int], str] = {}
        for role, directory in (("target", pair.target), ("draft", pair.draft)):
            for count in threads:
                flags = [f"--model={directory}", f"--dtype={dtype}", f"--threads={count}", f"--kv-slots={_KV_SLOTS}"]
                each = await made.model(f"{role}_service", *flags)
                addresses[role, count] = each.address
        clients: dict[tuple[tuple[int, ...], bool], Client] = {}
        for count, ahead in itertools.product(threads, (False, True)):
            flags = [f"--target={addresses['target', count]}", f"--draft={addresses['draft', count]}"]
            flags += [f"--tokenizer={pair.target}", f"--num-ahead-tokens={_AHEAD_TOKENS * ahead}"]
            _, clients[(count, count), ahead] = await made.orchestrator(*flags)
        yield Services(clients)

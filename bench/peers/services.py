"""Our three services as processes of their own, over gRPC: what a client of the orchestrator gets.

Every model service runs once per thread count, and an orchestrator for each target: those that are not asked do
nothing. Knows processes and requests; refuses to know models.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.deployment import Processes
from bench.models.damped_pair import Pair
from bench.peers.contender import ADAPTIVE, THREADS, Contender, Kind, Prompts, Run, Settings
from bench.peers.pass_log import Pass, busy_s, read_passes
from specdec.client import Client, Sample
from specdec.v1.generation_pb2 import SpeculationStats

_KV_SLOTS = 16384
"""More than anything here needs at a time. Left to themselves the services would share out the memory once per thread
count."""

_AHEAD_TOKENS = 60


@dataclass(frozen=True, slots=True)
class _Answer:
    """To one request."""

    sample: Sample
    first: float  # when the first and the last tokens came, on the machine's monotonic clock
    last: float


class Services:
    """Made by ``running``."""

    def __init__(self, clients: dict[tuple[tuple[int, ...], bool], Client], logs: Path) -> None:
        """``clients`` by threads, and by whether the draft goes on while the target verifies."""
        self._clients = clients
        self._logs = logs
        self._numbers = itertools.count()

    @property
    def threads(self) -> list[tuple[int, ...]]:
        """The combinations there are."""
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
        answers = await asyncio.gather(*(self._answer(settings, prompt, max_tokens) for prompt in prompts))
        seconds = time.perf_counter() - started
        told = [answer.sample.finish.speculation for answer in answers]
        figures = figures_of(told)
        if len(answers) == 1 and told[0].num_drafts:
            # What the target makes unasked comes by no round. A round that verifies something was asked for.
            figures["overhead_ms_per_round"] = self._overhead_s(settings, answers[0]) * 1e3 / told[0].num_drafts
        return Run(seconds, [answer.sample.token_ids for answer in answers], figures)

    def _overhead_s(self, settings: Settings, answer: _Answer) -> float:
        """Of the time between the first tokens and the last, what no pass of either model covers."""
        target, draft = settings.threads
        passes = [*self.passes("target", target), *self.passes("draft", draft)]
        return answer.last - answer.first - busy_s(passes, answer.first, answer.last)

    def passes(self, role: str, threads: int, since: float = 0.0) -> list[Pass]:
        """Of the service of that role with so many threads."""
        return read_passes(_log_file(self._logs, role, threads), since)

    def salt(self) -> str:
        """One that no request had before."""
        return f"salt {next(self._numbers)}"

    async def time_to_first_token(
        self, settings: Settings, prompt: list[int], max_tokens: int = 8, salt: str = ""
    ) -> float:
        """Seconds from the request to its first token; the rest of it is awaited, too. It may find in the services'
        caches what came with the same ``salt``."""
        started = time.perf_counter()
        answer = await self._answer(settings, prompt, max_tokens, salt)
        return answer.first - started

    async def _answer(self, settings: Settings, prompt: list[int], max_tokens: int, salt: str = "") -> _Answer:
        request: dict[str, Any] = {"token_ids": {"token_ids": prompt}, "max_tokens": max_tokens, "temperature": 0.0}
        # A service would find in its cache what it was asked a moment ago, and transformers would not.
        request["cache_salt"] = salt or self.salt()
        if settings.num_draft_tokens != ADAPTIVE:
            request["num_draft_tokens"] = settings.num_draft_tokens or 0
        sample = Sample()
        first = last = 0.0
        async with aclosing(self._clients[settings.threads, settings.ahead].stream(**request)) as responses:
            async for response in responses:
                if response.HasField("chunk"):
                    sample.add(response.chunk)
                    last = time.perf_counter()
                    first = first or (last if sample.token_ids else 0.0)
        return _Answer(sample, first, last)


def figures_of(told: Sequence[SpeculationStats]) -> dict[str, float]:
    """Of samples side by side. What was guessed from the text itself is no work of the draft's and stands apart."""

    def total(count: Callable[[SpeculationStats], int]) -> int:
        return sum(map(count, told))

    # The first round of all, the prefill, verifies nothing.
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
async def running(pair: Pair, dtype: str, logs: Path, threads: Sequence[int] = THREADS) -> AsyncIterator[Services]:
    """All services, healthy and connected, with so many threads for each model; ``logs`` is an empty directory.

    Raises StartError.
    """
    async with Processes() as made:
        addresses: dict[tuple[str, int], str] = {}
        for role, directory in (("target", pair.target), ("draft", pair.draft)):
            for count in threads:
                flags = [f"--model={directory}", f"--dtype={dtype}", f"--threads={count}", f"--kv-slots={_KV_SLOTS}"]
                flags += [f"--pass-log={_log_file(logs, role, count)}"]
                each = await made.model(f"bench.peers.logged_service {role}_service", *flags)
                addresses[role, count] = each.address
        clients: dict[tuple[tuple[int, ...], bool], Client] = {}
        for count, ahead in itertools.product(threads, (False, True)):
            flags = [f"--target={addresses['target', count]}", f"--draft={addresses['draft', count]}"]
            flags += [f"--tokenizer={pair.target}", f"--num-ahead-tokens={_AHEAD_TOKENS * ahead}"]
            _, clients[(count, count), ahead] = await made.orchestrator(*flags)
        yield Services(clients, logs)


def _log_file(logs: Path, role: str, threads: int) -> Path:
    return logs / f"{role}-{threads}.passes"

"""Our three services as separate processes over gRPC, as a client of the orchestrator sees them.

Every model service runs once per thread count, with two orchestrators for each target; unused processes are idle.
Knows processes and requests; does not know models.
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
"""More than any run needs. By default, the services of every thread count would together reserve too much memory."""

_AHEAD_TOKENS = 60


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to one request."""

    sample: Sample
    first: float  # arrival of the first and the last tokens on the machine's monotonic clock, seconds
    last: float


class Services:
    """Running services; see ``running``."""

    def __init__(self, clients: dict[tuple[tuple[int, ...], bool], Client], logs: Path) -> None:
        """``clients`` is keyed by the threads of target and draft, and by whether the draft grows ahead."""
        self._clients = clients
        self._logs = logs
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
        answers = await asyncio.gather(*(self._answer(settings, prompt, max_tokens) for prompt in prompts))
        seconds = time.perf_counter() - started
        told = [answer.sample.finish.speculation for answer in answers]
        figures = figures_of(told)
        if len(answers) == 1 and told[0].num_drafts:
            # Per round with a draft: autonomously decoded tokens need no round trip.
            figures["overhead_ms_per_round"] = self._overhead_s(settings, answers[0]) * 1e3 / told[0].num_drafts
        return Run(seconds, [answer.sample.token_ids for answer in answers], figures)

    def _overhead_s(self, settings: Settings, answer: _Answer) -> float:
        """Seconds between the first and the last tokens that no pass of either model covers."""
        target, draft = settings.threads
        passes = [*self.passes("target", target), *self.passes("draft", draft)]
        return answer.last - answer.first - busy_s(passes, answer.first, answer.last)

    def passes(self, role: str, threads: int, since: float = 0.0) -> list[Pass]:
        """The passes since ``since`` of the service of ``role`` with ``threads`` threads."""
        return read_passes(_log_file(self._logs, role, threads), since)

    def salt(self) -> str:
        """A new cache salt."""
        return f"salt {next(self._numbers)}"

    async def time_to_first_token(
        self, settings: Settings, prompt: list[int], max_tokens: int = 8, salt: str = ""
    ) -> float:
        """Seconds from the request to its first token; returns after its last one. The request may reuse cached
        prefixes of requests with the same ``salt``."""
        started = time.perf_counter()
        answer = await self._answer(settings, prompt, max_tokens, salt)
        return answer.first - started

    async def _answer(self, settings: Settings, prompt: list[int], max_tokens: int, salt: str = "") -> _Answer:
        request: dict[str, Any] = {"token_ids": {"token_ids": prompt}, "max_tokens": max_tokens, "temperature": 0.0}
        # Without a salt a service would reuse the prefixes of earlier requests, and transformers would not.
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
async def running(pair: Pair, dtype: str, logs: Path, threads: Sequence[int] = THREADS) -> AsyncIterator[Services]:
    """Healthy, connected services with each of ``threads`` per model. ``logs`` is an empty directory.

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

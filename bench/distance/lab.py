"""A pair behind its services, with a proxy in front of the draft that delays every byte.

Knows processes, cores and requests; does not know the comparisons.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.distance.modes import Mode
from bench.distance.pairs import Pair
from bench.distance.row import Run
from bench.harness.deployment import Processes
from specdec.client import Client
from testing.fault_proxy import FaultProxy


@dataclass(slots=True)
class Lab:
    """Running services: a client of each orchestrator, by name, and the proxy in front of the draft."""

    pair: Pair
    clients: dict[str, Client]
    proxy: FaultProxy
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def move_draft(self, round_trip_ms: float) -> None:
        self.proxy.set(latency_s=round_trip_ms / 2e3)

    def kill_draft(self) -> None:
        """Make the draft unreachable for the orchestrators: reset its streams and refuse new connections."""
        self.proxy.refuse = True
        self.proxy.reset()

    async def run(self, mode: Mode, temperature: float, streams: int, max_tokens: int, seed: int) -> Run:
        """Run ``streams`` concurrent requests. Their texts depend on ``seed``; only block verification changes them."""
        fields: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "verification": mode.method,
        }
        if mode.num_draft_tokens is not None:
            fields["num_draft_tokens"] = mode.num_draft_tokens
        if self.pair.computes:
            # A later run of the same prompt must not find its prefix in the KV cache.
            fields["cache_salt"] = f"run {next(self._numbers)}"
        prompts = [self.pair.prompt(stream, seed) for stream in range(streams)]
        client = self.clients[mode.front]
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(client.generate(token_ids={"token_ids": prompt}, **fields) for prompt in prompts)
        )
        seconds = time.perf_counter() - started
        samples = [sample for [sample] in answers]
        told = tuple(sample.finish.speculation for sample in samples)
        return Run(sum(len(sample.token_ids) for sample in samples), seconds, told)


@asynccontextmanager
async def lab(pair: Pair, num_ahead_tokens: int) -> AsyncIterator[Lab]:
    """Healthy, connected services. Raises StartError.

    If the pair computes, its target has core 0 to itself; everything else, also this process, runs on core 1.
    """
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(Processes())
        models = [await made.model(module, *flags) for module, flags in (pair.target, pair.draft)]
        target, draft = models
        proxy = await stack.enter_async_context(FaultProxy(draft.port))
        near = f"127.0.0.1:{proxy.port}"
        fronts = [("near", near, 0), ("ahead", near, num_ahead_tokens)]
        if pair.stranger:
            stranger = await made.model(pair.stranger[0], *pair.stranger[1])
            models.append(stranger)
            fronts.append(("strange", stranger.address, num_ahead_tokens))
        clients = {}
        for name, address, ahead in fronts:
            flags = [f"--target={target.address}", f"--draft={address}", f"--num-ahead-tokens={ahead}"]
            front, clients[name] = await made.orchestrator(*flags)
            if pair.computes:
                _pin(front.process.pid, {1})
        if pair.computes:
            for each in models:
                _pin(each.process.pid, {0 if each is target else 1})
            stack.enter_context(_pinned_here({1}))
        yield Lab(pair, clients, proxy)


@contextmanager
def _pinned_here(cores: Iterable[int]) -> Iterator[None]:
    """Pin this process, which runs the proxy and the clients, to ``cores``."""
    before = os.sched_getaffinity(0)
    _pin(os.getpid(), cores)
    try:
        yield
    finally:
        _pin(os.getpid(), before)


def _pin(process: int, cores: Iterable[int]) -> None:
    """Pin all threads of a process to ``cores``, if the machine has at least two."""
    if (os.cpu_count() or 1) > 1:
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)

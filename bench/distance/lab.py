"""A pair behind its services, with a proxy on the way to the draft that delays every byte.

Knows processes, cores and requests; refuses to know what is compared with what.
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

from bench.chaos.fault_proxy import FaultProxy
from bench.distance.modes import Mode
from bench.distance.pairs import Pair
from bench.distance.row import Run
from bench.harness.deployment import Processes
from specdec.client import Client


@dataclass(slots=True)
class Lab:
    """Running services: a client of each orchestrator, by name, and the way to the draft."""

    pair: Pair
    clients: dict[str, Client]
    proxy: FaultProxy
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def move_draft(self, round_trip_ms: float) -> None:
        self.proxy.set(latency_s=round_trip_ms / 2e3)

    def kill_draft(self) -> None:
        """As seen from the orchestrators: the stream is reset, and nobody listens."""
        self.proxy.refuse = True
        self.proxy.reset()

    async def run(self, mode: Mode, temperature: float, streams: int, max_tokens: int, seed: int) -> Run:
        """``streams`` requests at once. Their texts depend on ``seed``, not on the mode, unless it is block."""
        fields: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "verification": mode.method,
        }
        if mode.num_draft_tokens is not None:
            fields["num_draft_tokens"] = mode.num_draft_tokens
        if self.pair.computes:
            # Who comes second must not find its prompt computed.
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
    """Everything healthy and connected. Raises StartError.

    Where the pair computes, its target has core 0 to itself and everything else is on core 1, this process too.
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
    """This process: the proxy and the clients are in it."""
    before = os.sched_getaffinity(0)
    _pin(os.getpid(), cores)
    try:
        yield
    finally:
        _pin(os.getpid(), before)


def _pin(process: int, cores: Iterable[int]) -> None:
    """All its threads, if there are two cores. A pair that is asleep most of the time needs none of its own."""
    if (os.cpu_count() or 1) > 1:
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)

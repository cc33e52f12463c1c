"""Our three services with one engine, as processes. Knows flags and requests; does not know the measurements."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.harness.deployment import Processes
from bench.models.damped_pair import Pair
from bench.peers.contender import ADAPTIVE, Prompts, Run
from bench.peers.services import figures_of
from specdec.client import Client

ENGINES = ("torch", "vllm")
_KV_SLOTS = 16384

_FLAGS = {
    "torch": (),
    # The share of memory is only what vLLM asks for at its start: the KV slots are named.
    "vllm": (
        *("--vllm.enforce-eager", "--memory-fraction=0.1"),
        *("--vllm.max-num-seqs=16", "--vllm.max-model-len=2048"),
    ),
}


class Services:
    """Running services."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._salts = itertools.count()

    async def run(self, prompts: Prompts, max_tokens: int, num_draft_tokens: int) -> Run:
        """All prompts at once, greedy. ``num_draft_tokens``: 0 for the target alone, or ADAPTIVE."""
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
        if num_draft_tokens != ADAPTIVE:
            fields["num_draft_tokens"] = num_draft_tokens
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(
                # With a salt of its own no request finds a prefix that another has computed.
                self.client.generate(token_ids={"token_ids": prompt}, cache_salt=f"{next(self._salts)}", **fields)
                for prompt in prompts
            )
        )
        seconds = time.perf_counter() - started
        samples = [sample for [sample] in answers]
        told = [sample.finish.speculation for sample in samples]
        return Run(seconds, [list(sample.token_ids) for sample in samples], figures_of(told))


@asynccontextmanager
async def running(pair: Pair, engine: str, threads: int, with_draft: bool = True) -> AsyncIterator[Services]:
    """Healthy, connected services in float32. Raises StartError."""
    flags = ["--dtype=float32", f"--engine={engine}", f"--threads={threads}", f"--kv-slots={_KV_SLOTS}"]
    flags += _FLAGS[engine]
    async with Processes() as made:
        target = await made.model("target_service", f"--model={pair.target}", *flags)
        addresses = [f"--target={target.address}"]
        if with_draft:
            draft = await made.model("draft_service", f"--model={pair.draft}", *flags)
            addresses.append(f"--draft={draft.address}")
        _, client = await made.orchestrator(*addresses)
        yield Services(client)

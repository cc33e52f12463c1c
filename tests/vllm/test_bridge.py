"""Law: vLLM with our draft service gives the text that it gives alone, also if the draft dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from specdec.cli.processes import free_ports, healthy, service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = {"method": "custom_class", "model": "specdec.bridges.vllm.RemoteDraft", "num_speculative_tokens": 5}


@pytest.fixture(autouse=True)
def own_process(monkeypatch) -> None:
    """Engines of other tests are in this process, and remain."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("SPECDEC_DRAFT_WAIT_MS", "10000")  # a busy machine is no late draft


class Engine:
    """vLLM as its users run it."""

    def __init__(self, model: str, **options: Any) -> None:
        from vllm import LLM

        self._llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 28,
            disable_log_stats=False,
            **options,
        )
        self._engine = self._llm.llm_engine
        self._num_requests = 0

    def add(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        from vllm import SamplingParams

        for prompt in prompts:
            self._num_requests += 1
            sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            self._engine.add_request(str(self._num_requests), {"prompt_token_ids": list(prompt)}, sampling)

    def run(self, num_steps: int | None = None) -> list[list[int]]:
        """So many passes, or all that are left. The texts that ended, in the order of their requests."""
        ended: dict[int, list[int]] = {}
        while self._engine.has_unfinished_requests() and num_steps != 0:
            for output in self._engine.step():
                if output.finished:
                    ended[int(output.request_id)] = list(output.outputs[0].token_ids)
            num_steps = None if num_steps is None else num_steps - 1
        return [ended[number] for number in sorted(ended)]

    @property
    def num_accepted(self) -> float:
        names = {metric.name: metric for metric in self._llm.get_metrics()}
        return float(getattr(names["vllm:spec_decode_num_accepted_tokens"], "value", 0))

    def close(self) -> None:
        self._engine.engine_core.shutdown()


async def test_the_text_is_that_of_vllm_alone_and_stays_so_when_the_draft_dies(
    target_model: str, draft_model: str, prompts: list[list[int]], monkeypatch
) -> None:
    few = [prompt[: 8 + 5 * index] for index, prompt in enumerate(prompts[:6])]
    alone = await asyncio.to_thread(Engine, target_model)
    alone.add(few, 48)
    expected = await asyncio.to_thread(alone.run)
    alone.close()
    [port] = free_ports(1)
    monkeypatch.setenv("SPECDEC_DRAFT", f"127.0.0.1:{port}")
    arguments = [f"--model={draft_model}", "--dtype=float32", "--threads=1"]
    async with service("draft_service", port, arguments) as draft:
        await healthy(draft)
        engine = await asyncio.to_thread(Engine, target_model, speculative_config=CONFIG)
        try:
            engine.add(few, 48)
            assert await asyncio.to_thread(engine.run) == expected
            accepted = engine.num_accepted
            assert accepted > 0
            engine.add(few, 48)
            ended = await asyncio.to_thread(engine.run, 8)
            draft.process.kill()
            await draft.process.wait()
            assert ended + await asyncio.to_thread(engine.run) == expected
            assert engine.num_accepted > accepted
        finally:
            engine.close()

"""vLLM by itself as a contender, in a process of its own, with a window of requests. Knows vLLM's public interface.

The worker is in that process, too, as in our services with one device: on CPUs vLLM is faster so than by its default.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import Any

from bench.harness.runner import Answer, Ask, Request, Run, Window
from specdec.cli.processes import StartError

CONTEXT_TOKENS = 2048
CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class InVllm:
    """``how``: alone, draft_model or ngram."""

    target: str
    draft: str
    how: str
    threads: int
    num_draft_tokens: int
    end_token_ids: tuple[int, ...]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Ask]:
        """With the model loaded. Raises StartError, and so does what it yields."""
        with ProcessPoolExecutor(1, get_context("spawn"), _be_quiet) as process:

            async def ask(request: Request) -> Run:
                try:
                    return await asyncio.get_running_loop().run_in_executor(process, _run, self, request)
                except Exception as error:  # of any kind, from another process
                    raise StartError(f"vLLM {self.how}: {error!r}") from error

            await ask(Request([], 1, 0.0, 0, "", Window(0, 0)))
            yield ask


def _be_quiet() -> None:
    """What is printed in the process is no result, and Ctrl-C is for the one that began it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@cache
def _engine(settings: InVllm) -> Any:
    """Its LLMEngine, in float32."""
    # On no core of their own, as the services' threads.
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.threads)}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    import torch

    torch.set_num_threads(settings.threads)  # before vLLM's worker is made, which takes the function away
    from vllm import EngineArgs, LLMEngine

    speculative: dict[str, Any] = {"method": settings.how, "num_speculative_tokens": settings.num_draft_tokens}
    if settings.how == "draft_model":
        speculative["model"] = settings.draft
    if settings.how == "ngram":
        speculative["prompt_lookup_max"] = 4
    arguments = EngineArgs(
        settings.target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=16,
        kv_cache_memory_bytes=CACHE_BYTES,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        speculative_config=None if settings.how == "alone" else speculative,
    )
    return LLMEngine.from_engine_args(arguments)


def _run(settings: InVllm, request: Request) -> Run:
    return run_in_window(_engine(settings), request, settings.end_token_ids)


def run_in_window(engine: Any, request: Request, end_token_ids: Sequence[int]) -> Run:
    """``engine``: an LLMEngine. Answers end before an end token."""
    from vllm import SamplingParams

    assert request.window is not None
    answers: list[Answer] = []
    started = time.perf_counter()
    while sum(len(answer.token_ids) for answer in answers) < request.window.num_tokens:
        num_live = sum(answer.is_cut for answer in answers)
        for index in range(len(answers), len(answers) + request.window.num_live - num_live):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens_of(index),
                stop_token_ids=list(end_token_ids),
                ignore_eos=True,
                detokenize=False,
            )
            ids = list(request.prompts[index]["token_ids"]["token_ids"])
            engine.add_request(str(index), {"prompt_token_ids": ids, "cache_salt": request.salt}, params)
            answers.append(Answer([], is_cut=True))
        for output in engine.step():
            ids = [token for token in output.outputs[0].token_ids if token not in end_token_ids]
            answers[int(output.request_id)] = Answer(ids, is_cut=not output.finished)
    seconds = time.perf_counter() - started
    engine.abort_request([str(index) for index, answer in enumerate(answers) if answer.is_cut])
    return Run(seconds, answers)

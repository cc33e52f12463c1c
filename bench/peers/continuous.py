"""transformers' continuous batching: requests join and leave a batch with a paged cache, in a separate thread.

Knows its manager and the settings that suit it on a CPU; does not know our services.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.peers.contender import Contender, Kind, Prompts, Run, Settings, before_end
from bench.peers.transformers_peers import TransformersPair

_PAGE_TOKENS = 128
"""With 64-token prompts and 48 new tokens at 16 requests: 70 tokens/s, and 67 with the default of 256."""

_SPARE_PAGES = 8
"""A cache just large enough is the fastest by far: 48 tokens/s with 128 pages of 256 tokens, 67 with 40 pages."""


class ContinuousBatching:
    """Runs the target of ``pair``, which must not be used by other contenders meanwhile."""

    def __init__(self, pair: TransformersPair) -> None:
        self._pair = pair

    def contender(self, streams: int) -> Contender:
        return Contender(Kind.CONTINUOUS, streams, self._run, self._pair.threads)

    async def _run(self, settings: Settings, prompts: Prompts, max_tokens: int) -> Run:
        torch.set_num_threads(settings.threads[0])
        pages = sum(2 * math.ceil((len(prompt) + max_tokens) / _PAGE_TOKENS) for prompt in prompts)
        manager_context = self._pair.target.continuous_batching_context_manager(
            generation_config=GenerationConfig.from_dict(
                {
                    "do_sample": False,
                    "max_new_tokens": max_tokens,
                    "eos_token_id": self._pair.end_token_ids or -1,
                    "pad_token_id": 0,
                }
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS, num_blocks=pages + _SPARE_PAGES, max_batch_tokens=512
            ),
            timeout=60,
        )
        with manager_context as manager:
            _generate(manager, prompts[:1], 2)  # allocates the cache
            started = time.perf_counter()
            outputs = _generate(manager, prompts, max_tokens)
            seconds = time.perf_counter() - started
        return Run(seconds, [before_end(output, self._pair.end_token_ids) for output in outputs])


def _generate(manager: Any, prompts: Prompts, max_tokens: int) -> Prompts:
    names = manager.add_requests(inputs=list(prompts), max_new_tokens=max_tokens)
    finished: dict[str, list[int]] = {}
    while len(finished) < len(names):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            finished[result.request_id] = list(result.generated_tokens)
        elif not manager.is_running():
            raise RuntimeError("transformers' continuous batching ended before its requests did")
    return [finished[name] for name in names]

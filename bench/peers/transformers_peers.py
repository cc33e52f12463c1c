"""The contenders of transformers: generate, assisted generation, and generate on a padded batch.

Knows transformers' generation methods; does not know our services.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.models.damped_pair import Pair
from bench.peers.contender import THREADS, Contender, Kind, Prompts, Run, Settings, before_end

ASSISTED_DRAFT_TOKENS = (4, 6, 8, 10)


class TransformersPair:
    """Both models, loaded by transformers in this process."""

    def __init__(self, pair: Pair, dtype: str, threads: Sequence[int] = THREADS) -> None:
        self.threads = [(count,) for count in threads]
        loaded: list[Any] = [
            AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
            for directory in (pair.target, pair.draft)
        ]
        self.target, self.draft = loaded
        # A fixed number of draft tokens, independent of earlier acceptance and of the draft's confidence.
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        self.draft.generation_config.assistant_confidence_threshold = 0.0
        end = self.target.generation_config.eos_token_id
        self.end_token_ids: list[int] = [] if end is None else end if isinstance(end, list) else [end]

    def contenders(self, streams: int) -> list[Contender]:
        if streams > 1:
            return [Contender(Kind.PADDED, streams, self._generate, self.threads)]
        return [
            Contender(Kind.GENERATE, 1, self._generate, self.threads),
            Contender(Kind.ASSISTED, 1, self._assisted, self.threads, ASSISTED_DRAFT_TOKENS),
        ]

    async def _generate(self, settings: Settings, prompts: Prompts, max_tokens: int) -> Run:
        """Prompts have equal lengths, so padding costs nothing before the first end token."""
        torch.set_num_threads(settings.threads[0])
        return self._timed(prompts, max_tokens)

    async def _assisted(self, settings: Settings, prompts: Prompts, max_tokens: int) -> Run:
        torch.set_num_threads(settings.threads[0])
        self.draft.generation_config.num_assistant_tokens = settings.num_draft_tokens
        return self._timed(prompts, max_tokens, assistant_model=self.draft)

    def _timed(self, prompts: Prompts, max_tokens: int, **options: Any) -> Run:
        started = time.perf_counter()
        inputs = torch.tensor(prompts)  # [streams, prompt length]
        output: Tensor = self.target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=self.end_token_ids[0] if self.end_token_ids else 0,
            **options,
        )
        seconds = time.perf_counter() - started
        new = output[:, inputs.shape[1] :].tolist()
        return Run(seconds, [before_end(row, self.end_token_ids) for row in new])

    @torch.inference_mode()
    def acceptance(self, prompts: Prompts, outputs: Prompts) -> float:
        """How often the draft's most likely token is the target's token, over greedy outputs of the target."""
        right, total = 0, 0
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = self.draft(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits
            guesses = logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
            right += sum(guess == token for guess, token in zip(guesses, output, strict=True))
            total += len(output)
        return right / total

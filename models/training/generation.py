"""Plain autoregressive generation with one model, one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM


def _next(logits: Tensor, generator: torch.Generator | None) -> int:
    if generator is None:
        return int(logits.argmax())
    return int(torch.multinomial(logits.double().softmax(-1), 1, generator=generator))


@torch.no_grad()
def generate(
    model: LlamaForCausalLM, prompt: list[int], count: int, end: int, generator: torch.Generator | None
) -> list[int]:
    """The next tokens after the prompt, at most ``count``, up to and including the end token.

    With a generator they are sampled at temperature 1, without one they are the most likely tokens.
    """
    cache = DynamicCache(config=model.config)
    written: list[int] = []
    pending = prompt
    while len(written) < count and end not in written:
        output = model(input_ids=torch.tensor([pending]), past_key_values=cache, use_cache=True)
        pending = [_next(output.logits[0, -1], generator)]
        written += pending
    return written

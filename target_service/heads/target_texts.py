"""Texts that a target writes at load, of the kind that heads are trained on: answers to questions, hardly random.

Knows a runner; does not know heads. A model without a chat template writes from the beginning of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.core.sequence import Draw, SamplingParams
from specdec.passes.rows import Segment
from specdec.runner.checkpoint import asked
from specdec.runner.model_runner import ModelRunner

_QUESTIONS = (
    "Why is the sky blue? Explain it to a child.",
    "Write a short story about a lighthouse.",
    "Write a Python function that reverses a list.",
    "How do I cook rice?",
    "What were the causes of the First World War?",
    "If three pens cost six euros, what do seven pens cost?",
)
_LENGTH = 64
_MAX_PROMPT_TOKENS = 96
_ANSWER_TEMPERATURE, _TEXT_TEMPERATURE = 0.5, 1.0
"""From the same beginning a model needs more chance for different texts."""


@dataclass(frozen=True)
class WrittenText:
    """``start``: the first row of which the target wrote the next token."""

    ids: list[int]
    start: int


def prompts_of(directory: Path | None, runner: ModelRunner) -> list[list[int]]:
    """What texts begin with; equal ones for a model without a chat template, or with a long one."""
    prompts = asked(directory, _QUESTIONS) if directory is not None else []
    usable = [ids for ids in prompts if 0 < len(ids) <= _MAX_PROMPT_TOKENS and max(ids) < runner.info.vocab_size]
    config: Any = runner.model.config.get_text_config()
    first = next((id_ for id_ in (config.bos_token_id, *runner.info.eos_token_ids) if isinstance(id_, int)), 0)
    return usable or [[first] for _ in _QUESTIONS]


@torch.inference_mode()
def write(runner: ModelRunner, prompts: Sequence[Sequence[int]], seed: int) -> list[WrittenText]:
    """One text after each prompt, up to its end. The same for the same seed."""
    caches = [runner.new_cache(b"proof") for _ in prompts]
    texts, fed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    sampling = SamplingParams(_ANSWER_TEMPERATURE if len(set(map(tuple, prompts))) > 1 else _TEXT_TEMPERATURE)
    try:
        for _ in range(_LENGTH):
            segments = []
            for cache, ids, num_fed in zip(caches, texts, fed, strict=True):
                num = len(ids) - num_fed
                cache.take(num)
                segments.append(Segment.chain(ids[num_fed:], num_fed, cache.block_table, logit_rows=[num - 1]))
            outputs = runner.forward(segments)
            draws = [Draw(sampling, seed + number, len(ids)) for number, ids in enumerate(texts)]
            tokens = runner.backend.draw(torch.cat([rows.logits for rows in outputs]), draws).tolist()
            for number, (cache, ids, token) in enumerate(zip(caches, texts, tokens, strict=True)):
                cache.keep(range(len(ids) - fed[number]))
                fed[number] = len(ids)
                ids.append(token)
    finally:
        for cache in caches:
            cache.release()
    return [_up_to_end(ids, len(prompt), runner) for ids, prompt in zip(texts, prompts, strict=True)]


def _up_to_end(ids: list[int], num_prompt: int, runner: ModelRunner) -> WrittenText:
    """The text up to its end token, behind which it means nothing."""
    ends = [position for position in range(num_prompt, len(ids)) if ids[position] in runner.info.eos_token_ids]
    return WrittenText(ids[: ends[0]] if ends else ids, num_prompt - 1)

"""Texts that the target writes itself: what a head or a draft learns from. Many at once, with transformers' generate.

Acceptance is about the target's own tokens, so these teach more than any text of another author.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a prompt and its answer, which begins at ``first``."""

    ids: list[int]
    first: int


@torch.inference_mode()
def write(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float) -> list[Answer]:
    """One answer to each prompt, in one batch, up to and including an end token. Temperature 0 is greedy."""
    width, pad = max(map(len, prompts)), model.generation_config.pad_token_id or 0
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    outputs = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        **sampling,
    )[:, width:].tolist()
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    return [
        Answer([*prompt, *_cut(output, ends)], len(prompt)) for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _cut(output: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(output):
        if token in ends:
            return output[: index + 1]
    return output


def save(answers: Sequence[Answer], file: Path) -> None:
    """As one compressed file, which appears at once and complete."""
    ids = np.concatenate([answer.ids for answer in answers])
    partial = file.with_suffix(".partial.npz")
    np.savez_compressed(
        partial,
        ids=ids.astype(np.uint16 if ids.max() < 1 << 16 else np.uint32),
        lengths=np.array([len(answer.ids) for answer in answers], np.uint32),
        firsts=np.array([answer.first for answer in answers], np.uint32),
    )
    partial.replace(file)


def load(file: Path) -> list[Answer]:
    """What ``save`` wrote."""
    with np.load(file) as found:
        ends = found["lengths"].cumsum()
        parts = np.split(found["ids"].astype(np.int64), ends[:-1])
        return [Answer(part.tolist(), int(first)) for part, first in zip(parts, found["firsts"], strict=True)]

"""Texts that a target writes itself. Many at once, with transformers' generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from models.training import texts
from models.training.loop import Clock, report
from models.training.texts import Text

Prompts = list[list[int]]
TEMPERATURES = (0.0, 0.8, 0.0, 1.0)


@torch.inference_mode()
def write(model: Any, prompts: Prompts, max_new_tokens: int, temperature: float) -> list[Text]:
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
    end_ids = model.generation_config.eos_token_id
    end_ids = set(end_ids if isinstance(end_ids, list) else [end_ids])
    return [
        Text([*prompt, *_cut(output, end_ids)], len(prompt)) for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _cut(output: list[int], end_ids: set[int]) -> list[int]:
    for index, token in enumerate(output):
        if token in end_ids:
            return output[: index + 1]
    return output


def write_within(
    seconds: float,
    model: Any,
    prompts: Callable[[int], Iterator[Prompts]],
    *,
    directory: Path,
    min_tokens: int,
    max_tokens: int,
) -> list[Text]:
    """The answers that the target writes within the time, with what an earlier run left in the directory.

    ``prompts``: batches of them, from the one of a number on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written, number = texts.load(directory), len(texts.files(directory))
    clock_file = directory / "answered.txt"
    clock = Clock(seconds, float(clock_file.read_text()) if number else 0.0)
    torch.manual_seed(number)
    source = prompts(number)
    while clock.progress < 1:
        new = write(model, next(source), max_tokens, TEMPERATURES[number % len(TEMPERATURES)])
        new = [text for text in new if len(text.answer) >= min_tokens]
        texts.save(new, directory, number)
        clock_file.write_text(str(clock.used))
        number, written = number + 1, written + new
        report(f"{clock.used:5.0f} s {len(written)} answers, {sum(len(text.answer) for text in written)} tokens")
    return written

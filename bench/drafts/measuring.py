"""Measures drafts of one target. Does not know how figures are shown."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from safetensors import safe_open

from bench.harness.deployment import Processes
from specdec.client import Client

CHOSEN = None
FIXED = (1, 2, 4, 8)
NUMBERS = (*FIXED, CHOSEN)
"""Of draft tokens."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Of one draft and number of draft tokens. ``acceptance``: the share of all draft tokens that was accepted;
    ``length``: tokens per round; ``speed``: over the target alone."""

    acceptance: float
    length: float
    speed: float


Figures = Mapping[int | None, Figure]
"""By the number of draft tokens."""


def by_parameters(figure: Figure, number: int, share: float) -> float:
    """The speed over the target alone if a pass took as long as its model has parameters, as it does where memory
    bandwidth is the limit, and messages took no time. ``share``: the draft's parameters over the target's."""
    return figure.length / (1 + number * share)


def num_parameters(model: Path) -> int:
    """The numbers in a checkpoint's tensors. Raises ValueError if there is none."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model} is no checkpoint: it has no safetensors file")
    total = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total


def read_prompts(file: Path) -> list[str]:
    """Raises ValueError for a file of another form, or without a prompt."""
    try:
        texts = [str(each["text"]) for each in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{file} is no JSON list of {{"text": ...}}: {error!r}') from error
    if not texts:
        raise ValueError(f"{file} has no prompt")
    return texts


async def measure(
    target: Path, drafts: Sequence[Path], prompts: Sequence[str], tokens: int, threads: int, done: Callable[[], None]
) -> list[Figures]:
    """The figures of each draft. Raises StartError, and ValueError if a text differs."""
    shared = [f"--threads={threads}", "--kv-slots=16384"]
    async with Processes() as made:
        at = (await made.model("target_service", f"--model={target}", *shared)).address
        clients: list[Client] = []
        for draft in drafts:
            of_draft = (await made.model("draft_service", f"--model={draft}", *shared)).address
            _, client = await made.orchestrator(f"--target={at}", f"--tokenizer={target}", f"--draft={of_draft}")
            clients.append(client)
        told: list[dict[int | None, list[Figure]]] = [{number: [] for number in NUMBERS} for _ in drafts]
        for place, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
            seconds, alone, _ = await _ask(clients[0], prompt, tokens, 0)
            for client, figures in zip(clients, told, strict=True):
                for number in NUMBERS:
                    own_seconds, text, stats = await _ask(client, prompt, tokens, number)
                    if text != alone:
                        raise ValueError(f"the texts of a prompt differ: {prompt[:60]}")
                    accepted, drafted = stats.num_accepted_tokens, stats.num_draft_tokens
                    found = Figure(accepted / max(drafted, 1), len(text) / stats.num_rounds, seconds / own_seconds)
                    if place:
                        figures[number].append(found)
            done()
    return [{number: _typical(some) for number, some in figures.items()} for figures in told]


async def _ask(client: Client, prompt: str, tokens: int, number: int | None) -> tuple[float, list[int], Any]:
    fixed = {} if number is CHOSEN else {"num_draft_tokens": number}
    started = time.perf_counter()
    [sample] = await client.generate(text=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, **fixed)
    return time.perf_counter() - started, list(sample.token_ids), sample.finish.speculation


def _typical(some: Sequence[Figure]) -> Figure:
    return Figure(
        fmean(each.acceptance for each in some),
        fmean(each.length for each in some),
        median(each.speed for each in some),
    )

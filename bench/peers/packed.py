"""Compares one packed pass of our runner with one padded ``model(...)`` call of the same shape, in one process.

Knows both ways to compute rows after a cached context; does not know the life cycle of sequences.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from bench.peers.contender import THREADS, Prompts
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner

SEQUENCES, ROWS, CONTEXT = 16, 6, 96


@dataclass(frozen=True, slots=True)
class PackedResult:
    """Median seconds of a packed and of a padded pass, each at its best thread count."""

    packed_s: float
    packed_threads: int
    padded_s: float
    padded_threads: int

    @property
    def ratio(self) -> float:
        return self.packed_s / self.padded_s


@torch.inference_mode()
def packed_and_padded(
    runner: ModelRunner, model: Any, prompts: Prompts, repeats: int, threads: Sequence[int] = THREADS
) -> PackedResult:
    """Measure both kinds of pass in turns; both compute all rows' logits. ``prompts``: [SEQUENCES, CONTEXT + ROWS]."""
    padded, packed = _Padded(model, prompts), _Packed(runner, prompts)
    try:
        best: dict[str, tuple[float, int]] = {}
        for count in threads:
            torch.set_num_threads(count)
            seconds: dict[str, list[float]] = {"packed": [], "padded": []}
            for _ in range(repeats):
                seconds["packed"].append(_timed(packed.feed))
                seconds["padded"].append(_timed(padded.feed))
            for name, values in seconds.items():
                best[name] = min(best.get(name, (float("inf"), 0)), (statistics.median(values), count))
    finally:
        packed.release()
    return PackedResult(*best["packed"], *best["padded"])


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class _Padded:
    def __init__(self, model: Any, prompts: Prompts) -> None:
        ids = torch.tensor(prompts)  # [SEQUENCES, CONTEXT + ROWS]
        self._model, self._rows = model, ids[:, CONTEXT:]
        self._cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :CONTEXT], past_key_values=self._cache)

    def feed(self) -> None:
        self._model(input_ids=self._rows, past_key_values=self._cache)
        self._cache.crop(-ROWS)


class _Packed:
    def __init__(self, runner: ModelRunner, prompts: Prompts) -> None:
        self._runner, self._prompts = runner, prompts
        self._caches = [runner.new_cache() for _ in prompts]
        self._pass(0, CONTEXT, range(CONTEXT - 1, CONTEXT))
        for cache in self._caches:
            cache.keep(range(CONTEXT))

    def feed(self) -> None:
        self._pass(CONTEXT, CONTEXT + ROWS, range(ROWS))
        for cache in self._caches:
            cache.keep(())

    def release(self) -> None:
        for cache in self._caches:
            cache.release()

    def _pass(self, start: int, end: int, logit_rows: range) -> None:
        for cache in self._caches:
            cache.take(end - start)
        self._runner.forward(
            [
                Segment(prompt[start:end], range(-1, end - start - 1), start, cache.block_table, logit_rows)
                for prompt, cache in zip(self._prompts, self._caches, strict=True)
            ]
        )

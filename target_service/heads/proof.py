"""The proof of a head at load: it must agree with its target on the target's own text.

Folders count layers in two ways and are silent about norms, and a wrong guess only makes a head worse, without any
error. So each reading is tried, and the one that agrees most is taken.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.backends.taps import Taps
from specdec.core.sequence import Draw, SamplingParams
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from target_service.heads.checkpoint import EAGLE, HeadFiles
from target_service.heads.own_trees import OwnTrees
from target_service.heads.recurrent import RecurrentHead

log = logging.getLogger(__name__)

LEAST_AGREEMENT = 0.2
"""A head that agrees less often is not of this target."""

_TEXTS, _LENGTH = 8, 64


def proved(files: HeadFiles, runner: ModelRunner) -> OwnTrees:
    """The head in the reading that agrees best. Raises ValueError, with the agreement, if none does."""
    config: Any = runner.model.config.get_text_config()
    head = RecurrentHead(files, runner.model, runner.info.vocab_size, runner.backend)
    texts = _own_texts(runner)
    found: list[tuple[float, tuple[int, ...], bool]] = []
    for boundaries, before in itertools.product(_boundaries(files, config.num_hidden_layers), (False, True)):
        if len(boundaries) != head.num_taps:
            raise ValueError(f"the head {files.name} reads {head.num_taps} states, not {len(boundaries)}")
        head.other_reading = before
        taps = runner.tap(boundaries)
        try:
            found.append((_agreement(head, taps, runner, texts, config.num_hidden_layers), boundaries, before))
        finally:
            taps.remove()
    best, boundaries, head.other_reading = max(found)
    told = {"head": files.name, "kind": files.kind, "agreement": round(best, 3), "states_before_layers": boundaries}
    log.info("head", extra=told)
    if best < LEAST_AGREEMENT:
        raise ValueError(
            f"the head {files.name} is of another model: it agrees with {best:.0%} of this target's own tokens"
        )
    return OwnTrees(head, runner.tap(boundaries), runner, config.num_hidden_layers)


def _boundaries(files: HeadFiles, num_layers: int) -> list[tuple[int, ...]]:
    """What a folder may mean by its layers: their outputs, or the states before them."""
    if files.kind == EAGLE:
        return [(num_layers,)]
    if not files.layers:
        return [(2, num_layers // 2, num_layers - 3)]
    readings = [tuple(layer + shift for layer in files.layers) for shift in (1, 0)]
    return [reading for reading in readings if max(reading) < num_layers] or readings[1:]


@torch.inference_mode()
def _own_texts(runner: ModelRunner) -> list[list[int]]:
    """Texts that the target samples from the beginning."""
    config: Any = runner.model.config.get_text_config()
    first = next((each for each in (config.bos_token_id, *runner.info.eos_token_ids) if isinstance(each, int)), 0)
    caches = [runner.new_cache(b"proof") for _ in range(_TEXTS)]
    texts = [[first] for _ in caches]
    sampling = SamplingParams()
    try:
        while len(texts[0]) < _LENGTH:
            segments = []
            for cache, ids in zip(caches, texts, strict=True):
                cache.take(1)
                segments.append(Segment([ids[-1]], [-1], len(ids) - 1, cache.block_table, [0]))
            outputs = runner.forward(segments)
            draws = [Draw(sampling, seed, len(texts[0])) for seed in range(_TEXTS)]
            tokens = runner.backend.draw(torch.cat([each.logits for each in outputs]), draws).tolist()
            for cache, ids, token in zip(caches, texts, tokens, strict=True):
                cache.keep([0])
                ids.append(token)
    finally:
        for cache in caches:
            cache.release()
    return texts


@torch.inference_mode()
def _agreement(
    head: RecurrentHead, taps: Taps, runner: ModelRunner, texts: Sequence[Sequence[int]], layer: int
) -> float:
    """How often the head's likeliest token is the target's."""
    caches = [runner.new_cache(b"proof") for _ in texts]
    try:
        segments = []
        for cache, ids in zip(caches, texts, strict=True):
            cache.take(len(ids))
            rows = range(len(ids))
            segments.append(Segment(ids, range(-1, len(ids) - 1), 0, cache.block_table, rows, exact=False))
        with taps.open():
            outputs = runner.forward(segments)
        states = torch.split(head.fused(taps.take(sum(map(len, texts)))), [len(ids) for ids in texts])
        packed_pass = runner.packed_pass(segments)
        before = torch.cat([_shifted(each) for each in states])
        ids = [token for text in texts for token in text]
        found = head.rows(ids, before, packed_pass.rows.positions, packed_pass, layer)
        guesses = head.ids[head.logits(found).argmax(-1)]
        wanted = torch.cat([each.logits for each in outputs]).argmax(-1)
        return float((guesses == wanted).float().mean())
    finally:
        for cache in caches:
            cache.release()


def _shifted(states: Tensor) -> Tensor:
    """The state before each row; none is known before the first."""
    return torch.cat([torch.zeros_like(states[:1]), states[:-1]])

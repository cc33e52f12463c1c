"""The proof of a head at load: it must agree with its target on the target's own text.

Folders of EAGLE heads count layers in two ways and are silent about norms, and a wrong guess only makes a head worse,
without any error. So each reading is tried, and the one that agrees most is taken.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.backends.taps import Taps
from specdec.core.sequence import Draw, SamplingParams
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from target_service.heads.checkpoint import EAGLE, MEDUSA, REDRAFTER, HeadFiles
from target_service.heads.layer_head import LayerHead
from target_service.heads.medusa import Medusa
from target_service.heads.recurrent import RecurrentHead
from target_service.heads.redrafter import ReDrafter
from target_service.own.own_trees import OwnTrees

log = logging.getLogger(__name__)

LEAST_AGREEMENT, LEAST_OF_LAST_STATE = 0.2, 0.05
"""A head that agrees less often is not of this target. Those that read its last state alone agree less."""

_TEXTS, _LENGTH = 8, 64


def proved(files: HeadFiles, runner: ModelRunner) -> OwnTrees:
    """The head, of EAGLE's kinds in the reading that agrees best. Raises ValueError, with the agreement, if it is too
    small."""
    return _of_last_state(files, runner) if files.kind in (MEDUSA, REDRAFTER) else _with_layer(files, runner)


def _of_last_state(files: HeadFiles, runner: ModelRunner) -> OwnTrees:
    config: Any = runner.model.config.get_text_config()
    taps = runner.tap((config.num_hidden_layers,))
    kind = Medusa if files.kind == MEDUSA else ReDrafter
    head = kind(files, runner.model, runner.info.vocab_size, runner.backend, taps)

    def guesses(states: list[Tensor], texts: Sequence[Sequence[int]], _: Sequence[Segment]) -> Tensor:
        tokens = [token for text in texts for token in text]
        return head.ids[head.after(torch.cat([_shifted(each) for each in states]), tokens).argmax(-1)]

    _judge(files, _agreement(guesses, taps, runner, _own_texts(runner)), taps.boundaries, LEAST_OF_LAST_STATE)
    return OwnTrees(head, files.choices)


def _judge(files: HeadFiles, agreement: float, boundaries: Sequence[int], least: float) -> None:
    told = {"head": files.name, "kind": files.kind, "agreement": round(agreement, 3)}
    log.info("head", extra={**told, "states_before_layers": tuple(boundaries)})
    if agreement < least:
        raise ValueError(
            f"the head {files.name} is of another model: it agrees with {agreement:.0%} of this target's own tokens"
        )


def _with_layer(files: HeadFiles, runner: ModelRunner) -> OwnTrees:
    config: Any = runner.model.config.get_text_config()
    layer = config.num_hidden_layers
    head = RecurrentHead(files, runner.model, runner.info.vocab_size, runner.backend)
    texts = _own_texts(runner)
    found: list[tuple[float, tuple[int, ...], bool]] = []

    def guesses(states: list[Tensor], texts: Sequence[Sequence[int]], segments: Sequence[Segment]) -> Tensor:
        packed_pass = runner.packed_pass(segments)
        before = torch.cat([_shifted(head.fused(each)) for each in states])
        tokens = [token for text in texts for token in text]
        rows = head.rows(tokens, before, packed_pass.rows.positions, packed_pass, layer)
        return head.ids[head.logits(rows).argmax(-1)]

    for boundaries, before in itertools.product(_boundaries(files, layer), (False, True)):
        if len(boundaries) != head.num_taps:
            raise ValueError(f"the head {files.name} reads {head.num_taps} states, not {len(boundaries)}")
        head.other_reading = before
        taps = runner.tap(boundaries)
        try:
            found.append((_agreement(guesses, taps, runner, texts), boundaries, before))
        finally:
            taps.remove()
    best, boundaries, head.other_reading = max(found)
    _judge(files, best, boundaries, LEAST_AGREEMENT)
    return OwnTrees(LayerHead(head, runner.tap(boundaries), runner, layer))


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
    guesses: Callable[[list[Tensor], Sequence[Sequence[int]], Sequence[Segment]], Tensor],
    taps: Taps,
    runner: ModelRunner,
    texts: Sequence[Sequence[int]],
) -> float:
    """How often the head's likeliest token is the target's. ``guesses``: the tokens after each row of the texts, from
    the target's states of each text and the segments of the pass."""
    caches = [runner.new_cache(b"proof") for _ in texts]
    try:
        segments = []
        for cache, ids in zip(caches, texts, strict=True):
            cache.take(len(ids))
            rows = range(len(ids))
            segments.append(Segment(ids, range(-1, len(ids) - 1), 0, cache.block_table, rows, exact=False))
        with taps.open():
            outputs = runner.forward(segments)
        states = list(torch.split(taps.take(sum(map(len, texts))), [len(ids) for ids in texts]))
        wanted = torch.cat([each.logits for each in outputs]).argmax(-1)
        return float((guesses(states, texts, segments) == wanted).float().mean())
    finally:
        for cache in caches:
            cache.release()


def _shifted(states: Tensor) -> Tensor:
    """The state before each row; none is known before the first."""
    return torch.cat([torch.zeros_like(states[:1]), states[:-1]])

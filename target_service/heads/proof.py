"""The proof of a head at load: it must agree with its target on the target's own text.

Folders of EAGLE heads count layers in two ways and do not describe norms, and a wrong guess only makes a head worse,
without any error. So each reading is tried, on more texts until one of them is clearly ahead, and that one is taken.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.backends.taps import Taps
from specdec.passes.rows import Segment
from specdec.runner.failures import in_words
from specdec.runner.model_runner import ModelRunner
from target_service.heads.checkpoint import EAGLE, MEDUSA, REDRAFTER, HeadFiles
from target_service.heads.last_state import LastState
from target_service.heads.layer_head import LayerHead, LayerState
from target_service.heads.medusa import Medusa
from target_service.heads.recurrent import RecurrentHead
from target_service.heads.redrafter import ReDrafter
from target_service.heads.target_texts import WrittenText, prompts_of, write
from target_service.self_draft.trees import SelfDraftTrees

log = logging.getLogger(__name__)

MIN_AGREEMENT, MIN_LAST_STATE_AGREEMENT = 0.2, 0.05
"""A head that agrees less often is not of this target. Those that read its last state alone agree less."""

_MAX_ROUNDS = 4
"""Of some 300 tokens each, while no reading is clearly ahead."""

_CLEARLY = 3.0
"""Standard deviations."""


class Reading(NamedTuple):
    """Of a folder: see RecurrentHead and specdec.backends.taps."""

    boundaries: tuple[int, ...]
    other: bool
    feeds_normed: bool


Predict = Callable[[list[Tensor], Sequence[int], Sequence[Segment]], Tensor]
"""The head's tokens after each row [..., rows], from the target's states of each text, the ids of all texts and the
segments of the pass."""


def proved(files: HeadFiles, runner: ModelRunner, directory: Path | None = None) -> SelfDraftTrees[Any]:
    """The head, of EAGLE's kinds in the reading that agrees best. ``directory``: of the target, for its chat template.
    Raises ValueError, with the agreement, if it is too small, or if the head does not fit."""
    prompts = prompts_of(directory, runner)
    prove = _last_state_head if files.kind in (MEDUSA, REDRAFTER) else _layer_head
    try:
        return prove(files, runner, prompts)
    except ValueError:
        raise
    except Exception as error:  # weights of other shapes may cause any
        raise ValueError(f"the head {files.name} cannot be used: {in_words(error)}") from error


def _last_state_head(
    files: HeadFiles, runner: ModelRunner, prompts: Sequence[Sequence[int]]
) -> SelfDraftTrees[LastState]:
    config: Any = runner.model.config.get_text_config()
    taps = runner.tap((config.num_hidden_layers,))
    kind = Medusa if files.kind == MEDUSA else ReDrafter
    head = kind(files, runner.model, runner.info.vocab_size, backend=runner.backend, taps=taps)

    def predict(states: list[Tensor], ids: Sequence[int], _: Sequence[Segment]) -> Tensor:
        return head.ids[head.after(torch.cat(list(map(_shifted, states))), ids).argmax(-1)]

    hits = _hits(predict, taps, runner, texts=write(runner, prompts, 0))
    _judge(files, float(hits.float().mean()), taps.boundaries, minimum=MIN_LAST_STATE_AGREEMENT)
    return SelfDraftTrees(head, files.choices)


def _judge(files: HeadFiles, agreement: float, boundaries: Sequence[int], *, minimum: float) -> None:
    details = {"head": files.name, "kind": files.kind, "agreement": round(agreement, 3)}
    log.info("head", extra={**details, "states_before_layers": tuple(boundaries)})
    if agreement < minimum:
        raise ValueError(
            f"the head {files.name} is of another model: it agrees with {agreement:.0%} of this target's own tokens"
        )


def _layer_head(files: HeadFiles, runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> SelfDraftTrees[LayerState]:
    config: Any = runner.model.config.get_text_config()
    layer = config.num_hidden_layers
    head = RecurrentHead(files, runner.model, runner.info.vocab_size, backend=runner.backend)

    def predict(states: list[Tensor], ids: Sequence[int], segments: Sequence[Segment]) -> Tensor:
        """In the second step the head reads its own states, as below the text: there more readings differ."""
        packed_pass, before, steps = runner.packed_pass(segments), list(map(head.fused, states)), []
        for _ in range(2):
            rows = head.rows(ids, torch.cat(list(map(_shifted, before))), packed_pass, layer=layer)
            before = list(torch.split(rows, list(map(len, before))))
            steps.append(head.ids[head.logits(rows).argmax(-1)])
        return torch.stack(steps)

    def hits(reading: Reading, texts: Sequence[WrittenText]) -> Tensor:
        _, head.other_reading, head.feeds_normed = reading
        taps = runner.tap(reading.boundaries)
        try:
            return _hits(predict, taps, runner, texts=texts)
        finally:
            taps.remove()

    boundaries, fed = _boundaries(files, layer), (False, True) if files.feeds_normed is None else (files.feeds_normed,)
    if any(len(layers) != head.num_taps for layers in boundaries):
        raise ValueError(f"the head {files.name} reads {head.num_taps} states, not {len(boundaries[0])}")
    readings = [Reading(*parts) for parts in itertools.product(boundaries, (False, True), fed)]
    best, agreement = _best(readings, hits, lambda seed: write(runner, prompts, seed))
    _judge(files, agreement, best.boundaries, minimum=MIN_AGREEMENT)
    _, head.other_reading, head.feeds_normed = best
    return SelfDraftTrees(LayerHead(head, runner.tap(best.boundaries), runner, layer=layer))


def _best(
    readings: Sequence[Reading],
    hits: Callable[[Reading, Sequence[WrittenText]], Tensor],
    write_texts: Callable[[int], Sequence[WrittenText]],
) -> tuple[Reading, float]:
    """The reading that agrees most often, and how often its first tokens do. Those clearly behind are not tried on
    further texts."""
    rounds: dict[Reading, list[Tensor]] = {reading: [] for reading in readings}
    for number in range(_MAX_ROUNDS):
        texts = write_texts(1000 * number)
        for reading in rounds:
            rounds[reading].append(hits(reading, texts))
        totals = {reading: torch.cat(parts, -1) for reading, parts in rounds.items()}
        best = max(totals, key=lambda reading: float(totals[reading].sum()))
        rounds = {
            reading: parts
            for reading, parts in rounds.items()
            if reading == best or not _is_behind(totals[reading], totals[best])
        }
        if len(rounds) == 1:
            break
    return best, float(totals[best][0].float().mean())


def _is_behind(one: Tensor, other: Tensor) -> bool:
    """Whether ``one`` agrees clearly less often, or the same: by the tokens on which they differ (McNemar's test)."""
    lead, differ = int(other.sum()) - int(one.sum()), int((other != one).sum())
    return lead >= _CLEARLY * math.sqrt(differ)


def _boundaries(files: HeadFiles, num_layers: int) -> list[tuple[int, ...]]:
    """What a folder may mean by its layers: their outputs, or the states before them."""
    if files.kind == EAGLE:
        return [(num_layers,)]
    if not files.layers:
        return [(2, num_layers // 2, num_layers - 3)]
    readings = [tuple(layer + shift for layer in files.layers) for shift in (1, 0)]
    return [reading for reading in readings if max(reading) < num_layers] or readings[1:]


@torch.inference_mode()
def _hits(
    predict: Predict, taps: Taps, runner: ModelRunner, *, texts: Sequence[WrittenText]
) -> Tensor:  # [..., tokens that the target wrote] bool
    """Whether the head's most likely token is the target's."""
    caches = [runner.new_cache(b"proof") for _ in texts]
    try:
        segments = []
        for cache, text in zip(caches, texts, strict=True):
            cache.take(len(text.ids))
            rows = range(len(text.ids))
            segments.append(Segment.chain(text.ids, 0, cache.block_table, logit_rows=rows, exact=False))
        with taps.open():
            outputs = runner.forward(segments)
        ids = [token for text in texts for token in text.ids]
        states = list(torch.split(taps.take(len(ids)), [len(text.ids) for text in texts]))
        wanted = torch.cat([part.logits for part in outputs]).argmax(-1)
        written = torch.cat([torch.arange(len(text.ids)) >= text.start for text in texts]).to(wanted.device)
        return (predict(states, ids, segments) == wanted)[..., written].cpu()
    finally:
        for cache in caches:
            cache.release()


def _shifted(states: Tensor) -> Tensor:
    """The state before each row; none is known before the first."""
    return torch.cat([torch.zeros_like(states[:1]), states[:-1]])

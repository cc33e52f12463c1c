"""Medusa: heads that each guess one of the next tokens from the target's last state, without knowing those before it.

Head k at row t guesses token t + 2 + k. The target itself gives token t + 1, the root. (Cai et al. 2024, "Medusa:
Simple LLM Inference Acceleration Framework with Multiple Decoding Heads".)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.backends.base import Backend
from specdec.backends.taps import Taps
from target_service.heads.checkpoint import MEDUSA, HeadFiles
from target_service.heads.last_state import OfLastState
from target_service.heads.weights import layer_of, output_of
from target_service.self_draft.ranking import guesses
from target_service.self_draft.trees import NO_GUESSES, NUM_CHILDREN, Growing, Guesses


class Medusa(OfLastState, nn.Module):
    """See target_service.self_draft.trees.Head."""

    kind = MEDUSA

    def __init__(self, files: HeadFiles, target: Any, vocab_size: int, backend: Backend, taps: Taps) -> None:
        """``target`` gives the output where the heads have none. Raises ValueError if they do not fit it."""
        super().__init__()
        self.taps = taps
        self.num_children = max([NUM_CHILDREN, *(1 + rank for path in files.choices for rank in path)])
        like: Tensor = target.get_output_embeddings().weight
        width = like.shape[1]
        self.blocks: Any = nn.ModuleList()
        self.outputs = nn.ModuleList()
        while f"{len(self.blocks)}.0.weight" in files.weights:
            head, layers = len(self.blocks), nn.ModuleList()
            while f"{head}.{len(layers)}.weight" in files.weights:
                layers.append(layer_of(files, f"{head}.{len(layers)}", width, width, like))
            self.blocks.append(layers)
            own = files.weights.get(f"{head}.output.weight")
            if not head or own is not None:  # else they share one
                output, self.ids = output_of(files, target, vocab_size, own, width)
                self.outputs.append(output)
        if len(self.outputs) not in (1, len(self.blocks)):
            raise ValueError(f"of the heads {files.name} some have an output, and others have none")
        backend.pack(self)

    def logits(self, states: Tensor, head: int) -> Tensor:  # [rows, hidden_size] -> [rows, draft vocabulary]
        """Of the tokens ``ids``."""
        for layer in self.blocks[head]:
            states = states + F.silu(layer(states))
        found: Tensor = self.outputs[min(head, len(self.outputs) - 1)](states)
        return found

    def after(self, states: Tensor, tokens: Sequence[int]) -> Tensor:  # [rows, draft vocabulary]
        """The logits after ``tokens``, each of which follows its state [rows, hidden_size]."""
        return self.logits(states, 0)

    def begin(self, growing: Sequence[Growing]) -> list[Growing]:
        """Make the guesses of all depths at once: at a depth they are the same below every node."""
        able = super().begin(growing)
        for each in able:
            each.memory.of_head.by_depth.clear()
        for depth in range(len(self.blocks)):
            asking = [each for each in able if each.max_nodes > depth]
            if not asking:
                break
            logits = self.logits(torch.stack([each.memory.of_head.state for each in asking]), depth)
            draws = [each.sampling.draw(len(each.ids) + depth) for each in asking]
            for each, found in zip(asking, guesses(logits, self.ids, draws, self.num_children), strict=True):
                each.memory.of_head.by_depth.append(found)
        return able

    def guess(self, places: Sequence[tuple[Growing, int]]) -> list[Guesses]:
        found = []
        for each, node in places:
            depth, by_depth = each.position(node) - len(each.ids), each.memory.of_head.by_depth
            found.append(by_depth[depth] if depth < len(by_depth) else NO_GUESSES)
        return found

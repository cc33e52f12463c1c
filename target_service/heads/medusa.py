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
from target_service.heads.last_state import LastState, OfLastState
from target_service.heads.weights import layer_of, output_of
from target_service.self_draft.ranking import ranked_candidates
from target_service.self_draft.trees import NO_CANDIDATES, NUM_CHILDREN, Candidates, GrowingDraft, Parent


class Medusa(OfLastState, nn.Module):
    """See target_service.self_draft.trees.Head."""

    kind = MEDUSA

    def __init__(self, files: HeadFiles, target: Any, vocab_size: int, backend: Backend, taps: Taps) -> None:
        """``target`` gives the output where the heads have none. Raises ValueError if they do not fit it."""
        super().__init__()
        self.taps, self._backend = taps, backend
        self.num_children = max([NUM_CHILDREN, *(1 + rank for path in files.choices for rank in path)])
        like: Tensor = target.get_output_embeddings().weight
        width = like.shape[1]
        self.blocks: Any = nn.ModuleList()
        self.outputs = nn.ModuleList()
        while f"{len(self.blocks)}.0.weight" in files.weights:
            head, layers = len(self.blocks), nn.ModuleList()
            while f"{head}.{len(layers)}.weight" in files.weights:
                layers.append(layer_of(files, f"{head}.{len(layers)}", shape=(width, width), like=like))
            self.blocks.append(layers)
            weight = files.weights.get(f"{head}.output.weight")
            if not head or weight is not None:  # else they share one
                output, self.ids = output_of(files, target, vocab_size, weight=weight, width=width)
                self.outputs.append(output)
        if len(self.outputs) not in (1, len(self.blocks)):
            raise ValueError(f"only some of the heads {files.name} have an output")
        backend.pack(self)

    def logits(self, states: Tensor, head: int) -> Tensor:  # [rows, hidden_size] -> [rows, draft vocabulary]
        """Of the tokens ``ids``."""
        for layer in self.blocks[head]:
            states = states + F.silu(layer(states))
        logits: Tensor = self.outputs[min(head, len(self.outputs) - 1)](states)
        return logits

    def after(self, states: Tensor, tokens: Sequence[int]) -> Tensor:  # [rows, draft vocabulary]
        """The logits after ``tokens``, each of which follows its state [rows, hidden_size]."""
        return self.logits(states, 0)

    def begin(self, drafts: Sequence[GrowingDraft[LastState]]) -> list[GrowingDraft[LastState]]:
        """Compute the candidates of all depths at once: at a depth they are the same below every node."""
        able = super().begin(drafts)
        for draft in able:
            draft.state.by_depth.clear()
        for depth in range(len(self.blocks)):
            deep = [draft for draft in able if draft.request.max_nodes > depth]
            if not deep:
                break
            logits = self.logits(torch.stack([draft.state.known for draft in deep]), depth)
            draws = [draft.request.sampling.draw(len(draft.request.ids) + depth) for draft in deep]
            candidates = ranked_candidates(
                logits, self.ids, draws, num_children=self.num_children, rank=self._backend.leaders
            )
            for draft, children in zip(deep, candidates, strict=True):
                draft.state.by_depth.append(children)
        return able

    def candidates(self, parents: Sequence[Parent[LastState]]) -> list[Candidates]:
        by_depths = [(parent.draft.state.by_depth, parent.depth) for parent in parents]
        return [by_depth[depth] if depth < len(by_depth) else NO_CANDIDATES for by_depth, depth in by_depths]

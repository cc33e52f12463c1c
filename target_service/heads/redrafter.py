"""ReDrafter: a recurrent head that reads the target's last state, and the drafted tokens one after the other.

Its state begins at 0 before the root. (Zhang et al. 2024, "Recurrent Drafter for Fast Speculative Decoding in Large
Language Models"; its beams share prefixes, and so are a tree.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.backends.base import Backend
from specdec.backends.taps import Taps
from specdec.core.device import indices
from specdec.core.tree import ROOT
from target_service.heads.checkpoint import REDRAFTER, HeadFiles
from target_service.heads.last_state import LastState, OfLastState
from target_service.heads.weights import layer_of, output_of
from target_service.self_draft.ranking import ranked_candidates
from target_service.self_draft.trees import Candidates, Parent


class ReDrafter(OfLastState, nn.Module):
    """See target_service.self_draft.trees.Head."""

    kind = REDRAFTER

    def __init__(self, files: HeadFiles, target: Any, vocab_size: int, backend: Backend, taps: Taps) -> None:
        """``target`` gives the embedding, and the output where the head has none. Raises ValueError if it does not fit
        the target."""
        super().__init__()
        self.taps, self._backend, weights = taps, backend, files.weights
        self.embedding: Any = target.get_input_embeddings()
        like: Tensor = target.get_output_embeddings().weight
        size = like.shape[1]
        self.enter: Any = None
        width = 2 * size
        if (weight := weights.get("input_proj.weight")) is not None:
            width = len(weight)
            self.enter = layer_of(files, "input_proj", shape=(width, 2 * size), like=like)
        self.blocks = nn.ModuleList()
        while f"lm_head.{len(self.blocks)}.linear.weight" in weights:
            self.blocks.append(layer_of(files, f"lm_head.{len(self.blocks)}.linear", shape=(width, width), like=like))
        weight = weights.get(f"lm_head.{len(self.blocks)}.weight")
        self.output, self.ids = output_of(files, target, vocab_size, weight=weight, width=width)
        self.from_token: Any = None
        if "rnn_w.weight" in weights:
            self.from_token = layer_of(files, "rnn_w", shape=(size, size), like=like)
            self.from_state: Any = layer_of(files, "rnn_u", shape=(size, size), like=like)
        backend.pack(self)

    def next_states(self, states: Tensor, tokens: Sequence[int]) -> Tensor:  # [rows, hidden_size]
        """The head's states after ``tokens``."""
        embedded: Tensor = self.embedding(indices(tokens, states.device))
        if self.from_token is None:
            return embedded + states
        return F.silu(self.from_token(embedded) + self.from_state(states))

    def logits(self, target_states: Tensor, states: Tensor) -> Tensor:  # [rows, draft vocabulary]
        """Of the tokens ``ids``, from the target's states and the head's, [rows, hidden_size] each."""
        rows = torch.cat([target_states, states], -1)
        if self.enter is not None:
            rows = self.enter(rows)
        for block in self.blocks:
            rows = rows + F.silu(block(rows))
        logits: Tensor = self.output(rows)
        return logits

    def after(self, states: Tensor, tokens: Sequence[int]) -> Tensor:  # [rows, draft vocabulary]
        """The logits after ``tokens``, each of which follows its state [rows, hidden_size] of the target."""
        return self.logits(states, self.next_states(torch.zeros_like(states), tokens))

    def candidates(self, parents: Sequence[Parent[LastState]]) -> list[Candidates]:
        target_states = torch.stack([draft.state.known for draft, _ in parents])
        start = torch.zeros_like(target_states[0])
        before = [start if node == ROOT else draft.states[draft.tree.parents[node]] for draft, node in parents]
        states = self.next_states(torch.stack(before), [parent.token for parent in parents])
        for (draft, node), state in zip(parents, states, strict=True):
            draft.states[node] = state
        logits, draws = self.logits(target_states, states), [parent.draw for parent in parents]
        return ranked_candidates(logits, self.ids, draws, rank=self._backend.leaders)

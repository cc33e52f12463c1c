"""ReDrafter: a recurrent head that reads the target's last state, and the drafted tokens one after the other.

Its own state begins at 0 before the root. (Zhang et al. 2024, "Recurrent Drafter for Fast Speculative Decoding in Large
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
from target_service.heads.last_state import OfLastState
from target_service.heads.weights import layer_of, output_of
from target_service.self_draft.ranking import guesses
from target_service.self_draft.trees import NUM_CHILDREN, Growing, Guesses


class ReDrafter(OfLastState, nn.Module):
    """See target_service.self_draft.trees.Head."""

    kind = REDRAFTER

    def __init__(self, files: HeadFiles, target: Any, vocab_size: int, backend: Backend, taps: Taps) -> None:
        """``target`` gives the embedding, and the output where the head has none. Raises ValueError if it does not fit
        the target."""
        super().__init__()
        self.taps, weights = taps, files.weights
        self.embedding: Any = target.get_input_embeddings()
        like: Tensor = target.get_output_embeddings().weight
        size = like.shape[1]
        self.enter: Any = None
        width = 2 * size
        if (found := weights.get("input_proj.weight")) is not None:
            width = len(found)
            self.enter = layer_of(files, "input_proj", width, 2 * size, like)
        self.blocks = nn.ModuleList()
        while f"lm_head.{len(self.blocks)}.linear.weight" in weights:
            self.blocks.append(layer_of(files, f"lm_head.{len(self.blocks)}.linear", width, width, like))
        own = weights.get(f"lm_head.{len(self.blocks)}.weight")
        self.output, self.ids = output_of(files, target, vocab_size, own, width)
        self.from_token: Any = None
        if "rnn_w.weight" in weights:
            self.from_token = layer_of(files, "rnn_w", size, size, like)
            self.from_state: Any = layer_of(files, "rnn_u", size, size, like)
        backend.pack(self)

    def next_states(self, states: Tensor, tokens: Sequence[int]) -> Tensor:  # [rows, hidden_size]
        """The head's own states after ``tokens``."""
        embedded: Tensor = self.embedding(indices(tokens, states.device))
        if self.from_token is None:
            return embedded + states
        return F.silu(self.from_token(embedded) + self.from_state(states))

    def logits(self, target_states: Tensor, states: Tensor) -> Tensor:  # [rows, draft vocabulary]
        """Of the tokens ``ids``, from the target's states and the head's own, [rows, hidden_size] each."""
        rows = torch.cat([target_states, states], -1)
        if self.enter is not None:
            rows = self.enter(rows)
        for block in self.blocks:
            rows = rows + F.silu(block(rows))
        found: Tensor = self.output(rows)
        return found

    def after(self, states: Tensor, tokens: Sequence[int]) -> Tensor:  # [rows, draft vocabulary]
        """The logits after ``tokens``, each of which follows its state [rows, hidden_size] of the target."""
        return self.logits(states, self.next_states(torch.zeros_like(states), tokens))

    def guess(self, places: Sequence[tuple[Growing, int]]) -> list[Guesses]:
        of_target = torch.stack([each.memory.of_head.state for each, _ in places])
        start = torch.zeros_like(of_target[0])
        before = [start if node == ROOT else each.states[each.tree.parents[node]] for each, node in places]
        states = self.next_states(torch.stack(before), [each.token(node) for each, node in places])
        for (each, node), state in zip(places, states, strict=True):
            each.states[node] = state
        draws = [each.sampling.draw(each.position(node)) for each, node in places]
        return guesses(self.logits(of_target, states), self.ids, draws, NUM_CHILDREN)

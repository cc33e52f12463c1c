"""Token Recycling: a table of what the target found likeliest after each token the last time, as a head.

It needs no training. Each pass fills the rows of its tokens, rejected ones as well. (Luo et al. 2024, "Turning Trash
into Treasure: Accelerating Inference of Large Language Models with Token Recycling".)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from target_service.self_draft.ranking import guesses
from target_service.self_draft.trees import NO_GUESSES, NUM_CHILDREN, Growing, Guesses, Passed, SelfDraftState

_TOP = 8
"""Tokens of a row."""

_MOST_SALTS = 32
"""Tables at once. Memory is used for the rows that were filled."""


class Table:
    """The likeliest tokens after each token, and their logits less that of the first, by falling logit."""

    def __init__(self, vocab_size: int) -> None:
        # Zeros take no memory before they are written.
        self.tokens = np.zeros((vocab_size, min(_TOP, vocab_size)), np.int32)
        self.logits = np.zeros((vocab_size, min(_TOP, vocab_size)), np.float32)
        self.known = np.zeros(vocab_size, bool)


class Recycling:
    """See target_service.self_draft.trees.Head."""

    kind = "recycling"
    taps = None

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tables: OrderedDict[bytes, Table] = OrderedDict()

    def open(self, salt: bytes) -> Table:
        """The table of all sequences with this salt."""
        if salt not in self._tables:
            self._tables[salt] = Table(self._vocab_size)
            if len(self._tables) > _MOST_SALTS:
                self._tables.popitem(last=False)
        self._tables.move_to_end(salt)
        return self._tables[salt]

    def num_rows(self, memory: SelfDraftState) -> None:
        return None

    @torch.inference_mode()
    def learn(self, passed: Passed) -> None:
        table: Table = passed.memory.of_head
        if passed.decision is None or passed.outputs is None:
            return
        best = passed.outputs.logits[: 1 + len(passed.tree)].float().topk(table.tokens.shape[1])
        logits = (best.values - best.values[:, :1]).cpu().numpy()
        tokens = best.indices.cpu().numpy()
        at = np.array([passed.ids[-1], *passed.tree.token_ids])
        # Of rows of the same token that of the text counts: of equal indices the last one is written.
        accepted = [0, *(1 + node for node in passed.decision.accepted)]
        order = np.array([row for row in range(len(at)) if row not in accepted] + accepted)
        order = order[np.isfinite(logits[order]).all(-1)]
        table.tokens[at[order]], table.logits[at[order]], table.known[at[order]] = tokens[order], logits[order], True

    def begin(self, growing: Sequence[Growing]) -> Sequence[Growing]:
        return growing

    def guess(self, places: Sequence[tuple[Growing, int]]) -> list[Guesses]:
        rows = [(each.memory.of_head, each.token(node)) for each, node in places]
        logits = torch.from_numpy(np.stack([table.logits[token] for table, token in rows]))
        tokens = torch.from_numpy(np.stack([table.tokens[token] for table, token in rows])).long()
        draws = [each.sampling.draw(each.position(node)) for each, node in places]
        found = guesses(logits, tokens, draws, NUM_CHILDREN)
        return [made if table.known[token] else NO_GUESSES for (table, token), made in zip(rows, found, strict=True)]

    def end(self, growing: Sequence[Growing]) -> None:
        pass

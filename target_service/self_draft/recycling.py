"""Token Recycling: a table of what the target computed as most likely after each token the last time, as a head.

It needs no training. Each pass fills the rows of its tokens, rejected ones as well. (Luo et al. 2024, "Turning Trash
into Treasure: Accelerating Inference of Large Language Models with Token Recycling".)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from target_service.self_draft.ranking import ranked_candidates
from target_service.self_draft.trees import NO_CANDIDATES, Candidates, GrowingDraft, Parent, Passed

_TOP = 8
"""Tokens of a row."""

_MAX_SALTS = 32
"""Tables at once. Memory is used for the rows that were filled."""


class Table:
    """The most likely tokens after each token, and their logits less that of the first, by falling logit."""

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
            if len(self._tables) > _MAX_SALTS:
                self._tables.popitem(last=False)
        self._tables.move_to_end(salt)
        return self._tables[salt]

    def num_rows(self, state: Table) -> None:
        return None

    @torch.inference_mode()
    def learn(self, state: Table, passed: Passed) -> None:
        if passed.decision is None or passed.outputs is None:
            return
        best = passed.outputs.logits[: 1 + len(passed.tree)].float().topk(state.tokens.shape[1])
        logits = (best.values - best.values[:, :1]).cpu().numpy()
        tokens = best.indices.cpu().numpy()
        token_ids = np.array([passed.ids[-1], *passed.tree.token_ids])
        # Of rows of the same token that of the text counts: of equal indices the last one is written.
        accepted = [0, *(1 + node for node in passed.decision.accepted)]
        order = np.array([row for row in range(len(token_ids)) if row not in accepted] + accepted)
        order = order[np.isfinite(logits[order]).all(-1)]
        written = token_ids[order]
        state.tokens[written], state.logits[written], state.known[written] = tokens[order], logits[order], True

    def begin(self, drafts: Sequence[GrowingDraft[Table]]) -> Sequence[GrowingDraft[Table]]:
        return drafts

    def candidates(self, parents: Sequence[Parent[Table]]) -> list[Candidates]:
        rows = [(parent.draft.state, parent.token) for parent in parents]
        logits = torch.from_numpy(np.stack([table.logits[token] for table, token in rows]))
        tokens = torch.from_numpy(np.stack([table.tokens[token] for table, token in rows])).long()
        candidates = ranked_candidates(logits, tokens, [parent.draw for parent in parents])
        return [
            children if table.known[token] else NO_CANDIDATES
            for (table, token), children in zip(rows, candidates, strict=True)
        ]

    def end(self, drafts: Sequence[GrowingDraft[Table]]) -> None:
        pass

"""Knows how often each token occurs in a text, at its end and at every node of a tree below it; not what for."""

from __future__ import annotations

import numpy as np

from specdec.core.tree import TokenTree


class TokenCounts:
    """The tokens that occur and how often they were counted. Tokens of a tree are never added, so none is undone."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._token_ids = np.zeros(16, np.int64)  # by slot; longer than needed
        self._counts = np.zeros(16, np.int64)

    def add(self, token_id: int, count: int) -> None:
        """Count ``token_id`` so many times more; with 0 it occurs all the same."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._counts):
                self._token_ids, self._counts = (
                    np.append(a, np.zeros_like(a)) for a in (self._token_ids, self._counts)
                )
            self._token_ids[slot] = token_id
        self._counts[slot] += count

    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """The token_ids [n] that occur, each once, and their counts [n]. Good until the next ``add``."""
        return self._token_ids[: len(self._slots)], self._counts[: len(self._slots)]

    def along(self, tree: TokenTree) -> list[dict[int, int]]:
        """Of the root and each node the tokens of its path, with how often they occur then: all that is not as at the
        root."""
        found: list[dict[int, int]] = [{}]
        for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
            above = found[1 + parent]
            found.append({**above, token_id: 1 + above.get(token_id, self._count(token_id))})
        return found

    def _count(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        return 0 if slot is None else int(self._counts[slot])

"""Knows how often each token occurs in a text, at its end and at every node of a tree below it; not what for."""

from __future__ import annotations

import numpy as np

from specdec.tree import TokenTree


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

    def at_nodes(self, tree: TokenTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """token_ids [n]; counts [1 + nodes, n] at the root and each node; whether they occur there, of that shape."""
        slots, num_slots = self._slots, len(self._slots)
        new = {token_id: num_slots + i for i, token_id in enumerate(dict.fromkeys(tree.token_ids) - slots.keys())}
        token_ids = np.concatenate([self._token_ids[:num_slots], np.fromiter(new, np.int64, len(new))])
        counts = np.zeros((1 + len(tree), len(token_ids)), np.int64)
        counts[0, :num_slots] = self._counts[:num_slots]
        for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            counts[1 + node] = counts[1 + parent]
            counts[1 + node, slots.get(token_id, new.get(token_id, -1))] += 1
        occurs = counts > 0
        occurs[:, :num_slots] = True
        return token_ids, counts, occurs

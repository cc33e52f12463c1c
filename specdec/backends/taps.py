"""Taps: the hidden states of a pass's rows at boundaries between layers, copied only while they are asked for.

Boundary k is the state before layer k; that behind the last layer is the
state after the last norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Taps:
    """The taps of one model. A backend puts rows in while they are open."""

    def __init__(self, boundaries: Sequence[int], num_layers: int, remove: Callable[[], None] = lambda: None) -> None:
        """``remove``: takes them off the model. Raises ValueError if there is no such boundary."""
        if not all(0 <= boundary <= num_layers for boundary in boundaries):
            raise ValueError(f"the states before the target's layers {', '.join(map(str, boundaries))} cannot be read")
        self.boundaries, self.remove = tuple(boundaries), remove
        self.is_open = False
        self.num_copied = 0
        """Rows copied so far, at all boundaries."""
        self._states: dict[int, Tensor] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep the states of the pass inside."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def put(self, boundary: int, states: Tensor) -> None:
        """Keep the states of a pass's rows [rows or more, hidden_size], which are copies."""
        self._states[boundary] = states
        self.num_copied += len(states)

    def take(self, num_rows: int) -> Tensor:  # [num_rows, boundaries * hidden_size]
        """The states of the last pass's rows, side by side in the order of the boundaries."""
        states = torch.cat([self._states[boundary][:num_rows] for boundary in self.boundaries], -1)
        self._states.clear()
        return states

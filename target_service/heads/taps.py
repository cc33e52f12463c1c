"""Taps: the hidden states of a pass's rows at boundaries between layers, copied only while they are asked for.

Knows a model's list of decoder layers; does not know who reads the states. Boundary k is the state before layer k; that
behind the last layer is the state after the last norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Taps:
    """The taps of one model. No row is copied while they are closed."""

    def __init__(self, model: Any, boundaries: Sequence[int]) -> None:
        """Raises ValueError if the model has no such boundary."""
        body = model.base_model
        layers: Any = getattr(body, "layers", None)
        norm: Any = getattr(body, "norm", None)
        last = -1 if layers is None else len(layers) - (norm is None)
        if not all(0 <= boundary <= last for boundary in boundaries):
            raise ValueError(f"the states before the target's layers {', '.join(map(str, boundaries))} cannot be read")
        self.boundaries = tuple(boundaries)
        self.num_copied = 0
        """Rows copied so far, at all boundaries."""
        self._open = False
        self._states: dict[int, Tensor] = {}
        self._hooks = [
            layers[boundary].register_forward_pre_hook(self._keep(boundary), with_kwargs=True)
            for boundary in set(boundaries)
            if boundary < len(layers)
        ]
        if len(layers) in boundaries:
            self._hooks.append(norm.register_forward_hook(lambda _, __, output: self._note(len(layers), output)))

    def remove(self) -> None:
        """Take the taps off the model."""
        for hook in self._hooks:
            hook.remove()

    def _keep(self, boundary: int) -> Any:
        def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...], others: dict[str, Any]) -> None:
            self._note(boundary, inputs[0] if inputs else others["hidden_states"])

        return hook

    def _note(self, boundary: int, states: Tensor) -> None:
        if self._open:
            self._states[boundary] = states[0].clone()  # later layers may add to it in place
            self.num_copied += len(states[0])

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep the states of the pass inside."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def take(self, num_rows: int) -> Tensor:  # [num_rows, boundaries * hidden_size]
        """The states of the last pass's rows, side by side in the order of the boundaries."""
        states = torch.cat([self._states[boundary][:num_rows] for boundary in self.boundaries], -1)
        self._states.clear()
        return states

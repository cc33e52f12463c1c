"""Taps: the hidden states of a pass's rows at boundaries between layers, copied only while they are asked for.

Boundary k is the state before layer k; that behind the last layer is the
state after the last norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


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

    def taken(self) -> dict[int, Tensor]:
        """The states that were put in since, by boundary."""
        states, self._states = self._states, {}
        return states

    def take(self, num_rows: int) -> Tensor:  # [num_rows, boundaries * hidden_size]
        """The states of the last pass's rows, side by side in the order of the boundaries."""
        states = self.taken()
        return torch.cat([states[boundary][:num_rows] for boundary in self.boundaries], -1)


def tapped_layers(model: PreTrainedModel, boundaries: Sequence[int]) -> Taps:
    """Taps of a model that runs its own modules, by hooks. Raises ValueError if there is no such boundary."""
    body: Any = model.base_model
    layers: Any = getattr(body, "layers", ())
    norm: Any = getattr(body, "norm", None)
    hooks: list[Any] = []

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    taps = Taps(boundaries, len(layers) - (norm is None), remove)

    def note(boundary: int, states: Tensor) -> None:
        if taps.is_open:
            taps.put(boundary, states[0].clone())  # later layers may add to it in place

    def before(boundary: int) -> Any:
        def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...], others: dict[str, Any]) -> None:
            note(boundary, inputs[0] if inputs else others["hidden_states"])

        return hook

    for boundary in set(boundaries):
        if boundary < len(layers):
            hooks.append(layers[boundary].register_forward_pre_hook(before(boundary), with_kwargs=True))
        else:
            hooks.append(norm.register_forward_hook(lambda _, __, output: note(len(layers), output)))
    return taps

"""Replacement of a model's linear layers by those of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D


def replace_linears(
    model: torch.nn.Module,
    make: Callable[[Tensor, Tensor | None], torch.nn.Module],  # from weight [out_features, in_features] and bias
    takes: Callable[[Tensor], bool],
) -> None:
    """Replace, in place, every linear layer of ``model`` with a weight that ``takes`` accepts.

    A weight is freed as soon as its layer is replaced, unless it has another use, such as a tied embedding.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_linear(child):
                weight: Tensor = child.weight.t() if isinstance(child, Conv1D) else child.weight  # type: ignore
                bias: Tensor | None = child.bias  # type: ignore[assignment]
                if takes(weight):
                    setattr(parent, name, make(weight, bias))


def is_linear(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a linear layer, or a subclass with the same forward."""
    return type(module).forward in (torch.nn.Linear.forward, Conv1D.forward)


def repacked(model: torch.nn.Module) -> list[Any]:
    """Layers with a weight in a backend's own layout. Each has its size as ``nbytes``."""
    return [module for module in model.modules() if hasattr(module, "nbytes")]


def weight_bytes(model: torch.nn.Module) -> int:
    """Memory of the weights of ``model``, repacked or not."""
    tensors = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    packed: int = sum(layer.nbytes for layer in repacked(model))
    return tensors + packed

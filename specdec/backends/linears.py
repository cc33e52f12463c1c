"""The linear layers of a model, which a backend replaces by ones of its own. Knows modules; refuses to know kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D


def replace_linears(
    model: torch.nn.Module,
    make: Callable[[Tensor, Tensor | None], torch.nn.Module],  # of weight [out_features, in_features], and bias
    takes: Callable[[Tensor], bool],
) -> None:
    """Replace every linear layer of ``model`` whose weight ``takes`` accepts, in place.

    A weight is freed as soon as its layer is replaced, unless something else uses it, such as a tied embedding.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_linear(child):
                weight: Tensor = child.weight.t() if isinstance(child, Conv1D) else child.weight  # type: ignore
                bias: Tensor | None = child.bias  # type: ignore[assignment]
                if takes(weight):
                    setattr(parent, name, make(weight, bias))


def is_linear(module: torch.nn.Module) -> bool:
    """Also a subclass, unless it computes something else."""
    return type(module).forward in (torch.nn.Linear.forward, Conv1D.forward)


def repacked(model: torch.nn.Module) -> list[Any]:
    """Layers whose weight a backend has laid out anew. Each says its memory as ``nbytes``."""
    return [module for module in model.modules() if hasattr(module, "nbytes")]


def weight_bytes(model: torch.nn.Module) -> int:
    """Memory that the weights of ``model`` take, in whatever order they lie."""
    tensors = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    packed: int = sum(layer.nbytes for layer in repacked(model))
    return tensors + packed

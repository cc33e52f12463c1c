"""A head's weights as layers beside its target. Knows tensors; does not know what a head computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from target_service.heads.checkpoint import HeadFiles


def linear(weight: Tensor, bias: Tensor | None, like: Tensor) -> nn.Linear:
    """A layer of these weights, on the device and of the dtype of ``like``."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.to(like.device, like.dtype), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.to(like.device, like.dtype), requires_grad=False)
    return made


def embedding_of(files: HeadFiles, target: Any, vocab_size: int) -> Any:
    """The head's embedding where it has one that differs from the target's, else the target's. Raises ValueError if it
    does not fit."""
    of_target = target.get_input_embeddings()
    own, like = files.weights.get("embed_tokens.weight"), of_target.weight
    if own is None:
        return of_target
    if own.ndim != 2 or len(own) < vocab_size or own.shape[1] != like.shape[1]:
        raise ValueError(f"the embedding of the head {files.name} has the shape {tuple(own.shape)}")
    own = own[:vocab_size].to(like.device, like.dtype)
    if torch.equal(own, like[:vocab_size]):
        return of_target
    made = nn.Embedding(len(own), own.shape[1], device="meta")
    made.weight = nn.Parameter(own, requires_grad=False)
    return made


def output_of(
    files: HeadFiles, target: Any, vocab_size: int, own: Tensor | None, width: int
) -> tuple[nn.Linear, Tensor]:
    """The output for states of ``width`` numbers, and the target's id of each of its rows. ``own``: the head's; None:
    rows of the target's. Raises ValueError if it does not fit."""
    ids = files.ids if files.ids is not None else torch.arange(vocab_size)
    if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
        raise ValueError(f"the head {files.name} draws tokens that the target does not have")
    weight: Tensor = target.get_output_embeddings().weight
    ids = ids.to(weight.device)
    if own is None:
        own = weight[ids]
    elif files.ids is None:  # what is behind the vocabulary is padding
        own = own[:vocab_size]
    if own.shape != (len(ids), width):
        raise ValueError(f"the output of the head {files.name} has the shape {tuple(own.shape)}")
    _, first = np.unique(ids.cpu().numpy(), return_index=True)
    if len(first) < len(ids):  # rows of padding: siblings of a tree have different tokens
        kept = np.sort(first)
        own, ids = own[kept], ids[kept]
    return linear(own, None, weight), ids


def layer_of(files: HeadFiles, name: str, rows: int, columns: int, like: Tensor) -> nn.Linear:
    """A layer of the head, with a bias where it has one. Raises ValueError if its weight has another shape, or is not
    there."""
    found = files.weights.get(f"{name}.weight")
    if found is None or found.shape != (rows, columns):
        shape = "is missing" if found is None else f"has the shape {tuple(found.shape)}, not {(rows, columns)}"
        raise ValueError(f"{name}.weight of the head {files.name} {shape}")
    return linear(found, files.weights.get(f"{name}.bias"), like)

"""A head's weights as layers. Knows tensors; does not know what a head computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from target_service.heads.checkpoint import HeadFiles


def linear(weight: Tensor, bias: Tensor | None, like: Tensor) -> nn.Linear:
    """A layer of these weights, on the device and of the dtype of ``like``."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.to(like.device, like.dtype), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(like.device, like.dtype), requires_grad=False)
    return layer


def embedding_of(files: HeadFiles, target: Any, vocab_size: int) -> Any:
    """The head's embedding where it has one that differs from the target's, else the target's. Raises ValueError if it
    does not fit."""
    embedding = target.get_input_embeddings()
    weight, like = files.weights.get("embed_tokens.weight"), embedding.weight
    if weight is None:
        return embedding
    if weight.ndim != 2 or len(weight) < vocab_size or weight.shape[1] != like.shape[1]:
        raise ValueError(f"the embedding of the head {files.name} has the shape {tuple(weight.shape)}")
    weight = weight[:vocab_size].to(like.device, like.dtype)
    if torch.equal(weight, like[:vocab_size]):
        return embedding
    embedding = nn.Embedding(len(weight), weight.shape[1], device="meta")
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    return embedding


def output_of(
    files: HeadFiles, target: Any, vocab_size: int, *, weight: Tensor | None, width: int
) -> tuple[nn.Linear, Tensor]:
    """The output for states of ``width`` numbers, and the target's id of each of its rows. ``weight``: the head's;
    None: rows of the target's. Raises ValueError if it does not fit."""
    ids = files.ids if files.ids is not None else torch.arange(vocab_size)
    if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
        raise ValueError(f"the head {files.name} draws tokens that the target does not have")
    like: Tensor = target.get_output_embeddings().weight
    ids = ids.to(like.device)
    if weight is None:
        weight = like[ids]
    elif files.ids is None:  # what is behind the vocabulary is padding
        weight = weight[:vocab_size]
    if weight.shape != (len(ids), width):
        raise ValueError(f"the output of the head {files.name} has the shape {tuple(weight.shape)}")
    _, first = np.unique(ids.cpu().numpy(), return_index=True)
    if len(first) < len(ids):  # rows of padding: siblings of a tree have different tokens
        kept = np.sort(first)
        weight, ids = weight[kept], ids[kept]
    return linear(weight, None, like), ids


def layer_of(files: HeadFiles, name: str, *, shape: tuple[int, int], like: Tensor) -> nn.Linear:
    """A layer of the head, with a bias where it has one. Raises ValueError if its weight has another shape, or is not
    there."""
    weight = files.weights.get(f"{name}.weight")
    if weight is None or weight.shape != shape:
        problem = "is missing" if weight is None else f"has the shape {tuple(weight.shape)}, not {shape}"
        raise ValueError(f"{name}.weight of the head {files.name} {problem}")
    return linear(weight, files.weights.get(f"{name}.bias"), like)

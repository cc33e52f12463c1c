"""A head's folder: its kind, its sizes and its weights, in all spellings.

Tensor names decide, then config.json, because configurations are silent about much. Folders of the original EAGLE-3
(https://github.com/SafeAILab/EAGLE), SpecForge, speculators and ModelOpt have the same tensors under four spellings.
EAGLE-1, EAGLE-2 and HASS share one form, without norms around their layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_LAYER = "midlayer."
_ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
_MLP = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
_COMMON = (*(_LAYER + name for name in (*_ATTENTION, *_MLP, "post_attention_layernorm.weight")), "fc.weight")
_OTHERS = {"lm_head.weight", "d2t", "t2d", "embed_tokens.weight"}
_BIASES = {_LAYER + name.replace(".weight", ".bias") for name in _ATTENTION}

EAGLE, EAGLE3 = "eagle", "eagle3"
_NEEDED = {
    EAGLE3: (*_COMMON, f"{_LAYER}input_layernorm.weight", f"{_LAYER}hidden_norm.weight", "norm.weight"),
    EAGLE: _COMMON,
}
_KNOWN = {
    EAGLE3: {*_NEEDED[EAGLE3], *_OTHERS},
    EAGLE: {*_COMMON, *_OTHERS, *_BIASES, "fc.bias", f"{_LAYER}input_layernorm.weight"},
}


@dataclass(frozen=True)
class HeadFiles:
    """What a folder holds. ``weights`` have SpecForge's names. ``layers``: of the states that it reads, as the folder
    counts them; empty: the published default. ``ids``: the target's id of each row of the output."""

    name: str
    kind: str
    config: Mapping[str, Any]
    weights: dict[str, Tensor]
    layers: tuple[int, ...]
    ids: Tensor | None

    @property
    def rope_theta(self) -> float:
        """Its own: heads do not inherit their target's."""
        parameters = self.config.get("rope_parameters") or {}
        return float(parameters.get("rope_theta") or self.config.get("rope_theta") or 10_000.0)


def read_head(folder: Path) -> HeadFiles:
    """Read a folder. Raises ValueError, with one sentence, if it holds no head of a known kind."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} holds no head: its config.json cannot be read ({error})") from error
    weights = {_canonical(name): tensor for name, tensor in _weights(folder).items()}
    kind = EAGLE3 if f"{_LAYER}hidden_norm.weight" in weights else EAGLE
    if missing := [name for name in _NEEDED[kind] if name not in weights]:
        raise ValueError(f"{folder} holds no head of a known kind: it has no {missing[0]}")
    if unknown := sorted(set(weights) - _KNOWN[kind]):
        raise ValueError(f"{folder} is a head with {unknown[0]}, which is not supported")
    inner = config.get("transformer_layer_config") or {}
    ids = weights.pop("d2t", None)
    if ids is not None:  # offsets
        ids = ids.long() + torch.arange(len(ids))
    for name in ("t2d", "embed_tokens.weight"):  # the embedding is the target's
        weights.pop(name, None)
    eagle = config.get("eagle_config") or {}
    layers = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids") or ()
    return HeadFiles(folder.name, kind, {**inner, **config}, weights, tuple(layers), ids)


def _weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            if name.endswith(".bin"):
                found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
                return found
            return load_file(file)
        except Exception as error:  # whatever the reader raises
            raise ValueError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    raise ValueError(f"{folder} holds no head: it has neither model.safetensors nor pytorch_model.bin")


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return f"{_LAYER}{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name

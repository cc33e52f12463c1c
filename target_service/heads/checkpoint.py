"""A head's folder: its kind, its sizes and its weights, in all spellings.

Tensor names decide, then config.json, because configurations are silent about much. Folders of the original EAGLE-3
(https://github.com/SafeAILab/EAGLE), SpecForge, speculators and ModelOpt have the same tensors under four spellings.
EAGLE-1, EAGLE-2 and HASS share one form, without norms around their layer. Medusa's heads come from its authors
(https://github.com/FasterDecoding/Medusa), from TGI and in vLLM's form; ReDrafter's from
https://github.com/apple/ml-recurrent-drafter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from target_service.own.choices import nodes_of

_LAYER = "midlayer."
_ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
_MLP = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
_COMMON = (*(_LAYER + name for name in (*_ATTENTION, *_MLP, "post_attention_layernorm.weight")), "fc.weight")
_OTHERS = {"lm_head.weight", "d2t", "t2d", "embed_tokens.weight"}
_BIASES = {_LAYER + name.replace(".weight", ".bias") for name in _ATTENTION}

EAGLE, EAGLE3, MEDUSA, REDRAFTER = "eagle", "eagle3", "medusa", "redrafter"
_NEEDED = {
    EAGLE3: (*_COMMON, f"{_LAYER}input_layernorm.weight", f"{_LAYER}hidden_norm.weight", "norm.weight"),
    EAGLE: _COMMON,
    MEDUSA: ("0.0.weight",),
    REDRAFTER: ("lm_head.0.linear.weight",),
}
_KNOWN = {
    EAGLE3: "|".join(map(re.escape, {*_NEEDED[EAGLE3], *_OTHERS})),
    EAGLE: "|".join(map(re.escape, {*_COMMON, *_OTHERS, *_BIASES, "fc.bias", f"{_LAYER}input_layernorm.weight"})),
    MEDUSA: r"\d+\.\d+\.(weight|bias)|\d+\.output\.weight|token_map",
    REDRAFTER: r"(input_proj|lm_head\.\d+\.linear|rnn_u)\.(weight|bias)|lm_head\.\d+\.weight|rnn_w\.weight|d2t",
}
_FILES = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")


@dataclass(frozen=True)
class HeadFiles:
    """What a folder holds.

    ``weights``: of EAGLE's kinds under SpecForge's names, of ReDrafter under its own; of Medusa ``k.j.weight`` and
    ``.bias`` for layer j of head k, and ``k.output.weight``. ``layers``: of the states that it reads, as the folder
    counts them; empty: the published default. ``ids``: the target's id of each row of the output. ``choices``: the
    nodes of a static tree (see target_service.own.choices).
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    weights: dict[str, Tensor]
    layers: tuple[int, ...]
    ids: Tensor | None
    choices: tuple[tuple[int, ...], ...] = ()

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
    read = _weights(folder)
    kind = _kind(read)
    weights = _of_medusa(read) if kind == MEDUSA else {_canonical(name): tensor for name, tensor in read.items()}
    if missing := [name for name in _NEEDED[kind] if name not in weights]:
        raise ValueError(f"{folder} holds no head of a known kind: it has no {missing[0]}")
    if unknown := sorted(name for name in weights if not re.fullmatch(_KNOWN[kind], name)):
        raise ValueError(f"{folder} is a head with {unknown[0]}, which is not supported")
    inner = config.get("transformer_layer_config") or {}
    ids = weights.pop("token_map", None)
    if (offsets := weights.pop("d2t", None)) is not None:
        ids = offsets.long() + torch.arange(len(offsets))
    for name in ("t2d", "embed_tokens.weight"):  # the embedding is the target's
        weights.pop(name, None)
    eagle = config.get("eagle_config") or {}
    layers = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids") or ()
    choices = tuple(nodes_of(config.get("medusa_choices") or ()))
    return HeadFiles(folder.name, kind, {**inner, **config}, weights, tuple(layers), ids, choices)


def _weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder."""
    for name in _FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            if not name.endswith(".safetensors"):
                found: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
                return found
            return load_file(file)
        except Exception as error:  # whatever the reader raises
            raise ValueError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    raise ValueError(f"{folder} holds no head: it has none of {', '.join(_FILES)}")


_MEDUSA_LAYER = re.compile(r"(?:medusa_heads?\.)?(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
_MEDUSA_OUTPUT = re.compile(r"(?:medusa_heads?\.)?(?:(\d+)\.\d+|lm_heads\.(\d+))\.weight")


def _kind(weights: Mapping[str, Tensor]) -> str:
    if any(map(_MEDUSA_LAYER.fullmatch, weights)):
        return MEDUSA
    if "lm_head.0.linear.weight" in weights:
        return REDRAFTER
    return EAGLE3 if any(name.endswith("hidden_norm.weight") for name in weights) else EAGLE


def _of_medusa(read: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if any(name.startswith("model.layers.") for name in read):  # a model with heads inside
        read = {name: tensor for name, tensor in read.items() if name.startswith("medusa_head")}
    weights = {}
    for name, tensor in read.items():
        if found := _MEDUSA_LAYER.fullmatch(name):
            head, layer = found[1] or found[3], found[2] or found[4]
            weights[f"{head}.{layer}.{found[5]}"] = tensor
        elif found := _MEDUSA_OUTPUT.fullmatch(name):
            weights[f"{found[1] or found[2]}.output.weight"] = tensor
        elif name.removeprefix("medusa_heads.") in ("token_map", "lm_head.weight"):
            weights[name.removeprefix("medusa_heads.").replace("lm_head", "0.output")] = tensor
        else:
            weights[name] = tensor
    return weights


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return f"{_LAYER}{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name

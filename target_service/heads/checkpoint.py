"""A head's folder: its kind, its sizes and its weights, in all spellings.

Tensor names decide, then config.json, because configurations leave out much. Folders of the original EAGLE-3
(https://github.com/SafeAILab/EAGLE), SpecForge, speculators and ModelOpt have the same tensors under four spellings.
EAGLE-1, EAGLE-2 and HASS share one form, without norms around their layer. Medusa's heads come from its authors
(https://github.com/FasterDecoding/Medusa), from TGI and in vLLM's form; ReDrafter's from
https://github.com/apple/ml-recurrent-drafter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specdec.backends.layer_options import LayerOptions
from specdec.runner.failures import in_words
from specdec.runner.files import INDEX, SINGLE, read_json, refuse_inflated, refuse_pointer, weight_files
from target_service.self_draft.choices import nodes_of

_LAYER = "midlayer."
_ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
_MLP = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
_COMMON = (*(_LAYER + name for name in (*_ATTENTION, *_MLP, "post_attention_layernorm.weight")), "fc.weight")
_OTHERS = {"lm_head.weight", "d2t", "t2d", "embed_tokens.weight"}
_TAP_NORMS = r"input_norm\.weight|fc_norm\.\d+\.weight"
_BIASES = {_LAYER + name.replace(".weight", ".bias") for name in _ATTENTION}

EAGLE, EAGLE3, MEDUSA, REDRAFTER = "eagle", "eagle3", "medusa", "redrafter"
_NEEDED = {
    EAGLE3: (*_COMMON, f"{_LAYER}input_layernorm.weight", f"{_LAYER}hidden_norm.weight", "norm.weight"),
    EAGLE: _COMMON,
    MEDUSA: ("0.0.weight",),
    REDRAFTER: ("lm_head.0.linear.weight",),
}
_KNOWN = {
    EAGLE3: "|".join((*map(re.escape, {*_NEEDED[EAGLE3], *_OTHERS}), _TAP_NORMS)),
    EAGLE: "|".join(map(re.escape, {*_COMMON, *_OTHERS, *_BIASES, "fc.bias", f"{_LAYER}input_layernorm.weight"})),
    MEDUSA: r"\d+\.\d+\.(weight|bias)|\d+\.output\.weight|token_map",
    REDRAFTER: r"(input_proj|lm_head\.\d+\.linear|rnn_u)\.(weight|bias)|lm_head\.\d+\.weight|rnn_w\.weight|d2t",
}
_FILES = (SINGLE, "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt", INDEX)


@dataclass(frozen=True)
class HeadFiles:
    """What a folder holds.

    ``weights``: of EAGLE's kinds under SpecForge's names, of ReDrafter as they are; of Medusa ``k.j.weight`` and
    ``.bias`` for layer j of head k, and ``k.output.weight``. ``layers``: of the states that it reads, as the folder
    counts them; empty: the published default. ``ids``: the target's id of each row of the output. ``choices``: the
    nodes of a static tree (see target_service.self_draft.choices). ``layer``: of EAGLE's kinds.
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    weights: dict[str, Tensor]
    layers: tuple[int, ...]
    ids: Tensor | None
    choices: tuple[tuple[int, ...], ...] = ()
    layer: LayerOptions | None = None

    @property
    def feeds_normed(self) -> bool | None:
        """Of EAGLE-3: whether the layer's next row gets the state after the last norm (EAGLE 3.1). None: the folder
        does not say, since ``norm_output`` means this in speculators and vLLM, and something else in SpecForge."""
        named = bool(self.config.get("norm_output"))
        return named if not named or "speculators_model_type" in self.config else None


def read_head(folder: Path) -> HeadFiles:
    """Read a folder. Raises ValueError, with one sentence, if it holds no head of a known kind."""
    try:
        config = read_json(folder / "config.json")
        return _read(folder, config, _weights(folder))
    except ValueError as error:
        raise ValueError(f"{folder} holds no head that can be used: {error}") from error
    except Exception as error:  # each library has its own, and a value of another type may cause any of them
        raise ValueError(f"{folder} holds no head that can be used: {in_words(error)}") from error


def _read(folder: Path, config: Mapping[str, Any], read: dict[str, Tensor]) -> HeadFiles:
    kind = _kind(read)
    weights = _medusa_weights(read) if kind == MEDUSA else {_canonical(name): tensor for name, tensor in read.items()}
    if missing := [name for name in _NEEDED[kind] if name not in weights]:
        raise ValueError(f"it has no {missing[0]}, as each known kind has")
    if unknown := sorted(name for name in weights if not re.fullmatch(_KNOWN[kind], name)):
        raise ValueError(f"it has {unknown[0]}, which is not supported")
    inner, eagle = (config.get(name) or {} for name in ("transformer_layer_config", "eagle_config"))
    if not isinstance(inner, dict) or not isinstance(eagle, dict):
        raise ValueError("its transformer_layer_config and eagle_config are not objects")
    config = {**inner, **config}
    ids = weights.pop("token_map", None)
    if (offsets := weights.pop("d2t", None)) is not None:
        ids = offsets.long() + torch.arange(len(offsets))
    weights.pop("t2d", None)
    if config.get("norm_output") is False and "speculators_model_type" not in config:
        weights.pop("norm.weight", None)  # SpecForge: there is none before the output
    layers = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids") or ()
    if not isinstance(layers, list | tuple) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"its eagle_aux_hidden_state_layer_ids are no list of numbers: {layers!r}")
    choices = tuple(nodes_of(config.get("medusa_choices") or ()))
    layer = LayerOptions.read(config, len(weights["fc.weight"])) if kind in (EAGLE, EAGLE3) else None
    return HeadFiles(
        name=folder.name,
        kind=kind,
        config=config,
        weights=weights,
        layers=tuple(layers),
        ids=ids,
        choices=choices,
        layer=layer,
    )


def _weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder; of a model with heads inside, those of the heads alone."""
    name = next((name for name in _FILES if (folder / name).is_file()), None)
    if name is None:
        raise ValueError(f"it has none of {', '.join(_FILES)}")
    files = [folder / file for file in (weight_files(folder) if name in (SINGLE, INDEX) else [name])]
    try:
        if not name.endswith((".bin", ".pt")):
            return _safetensors(files)
        refuse_pointer(files[0])
        refuse_inflated(files[0])
        weights: dict[str, Tensor] = torch.load(files[0], map_location="cpu", weights_only=True)
        if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
            raise ValueError("it holds other things than tensors by name")
        return weights
    except Exception as error:  # whatever the reader raises
        raise ValueError(f"{name} cannot be read: {in_words(error)}") from error


def _safetensors(files: Sequence[Path]) -> dict[str, Tensor]:
    file_of: dict[str, Path] = {}
    for file in files:
        refuse_pointer(file)
        with safe_open(file, "pt") as tensors:
            file_of |= dict.fromkeys(tensors.keys(), file)
    heads = [name for name in file_of if name.startswith("medusa_head")]
    wanted = heads if heads and any(name.startswith("model.layers.") for name in file_of) else list(file_of)
    weights: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            weights |= {name: tensors.get_tensor(name) for name in wanted if file_of[name] == file}
    return weights


_MEDUSA_LAYER = re.compile(r"(?:medusa_heads?\.)?(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
_MEDUSA_OUTPUT = re.compile(r"(?:medusa_heads?\.)?(?:(\d+)\.\d+|lm_heads\.(\d+))\.weight")


def _kind(weights: Mapping[str, Tensor]) -> str:
    if any(map(_MEDUSA_LAYER.fullmatch, weights)):
        return MEDUSA
    if "lm_head.0.linear.weight" in weights:
        return REDRAFTER
    return EAGLE3 if any(name.endswith("hidden_norm.weight") for name in weights) else EAGLE


def _medusa_weights(read: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in read.items():
        if match := _MEDUSA_LAYER.fullmatch(name):
            head, layer = match[1] or match[3], match[2] or match[4]
            weights[f"{head}.{layer}.{match[5]}"] = tensor
        elif match := _MEDUSA_OUTPUT.fullmatch(name):
            weights[f"{match[1] or match[2]}.output.weight"] = tensor
        elif name.removeprefix("medusa_heads.") in ("token_map", "lm_head.weight"):
            weights[name.removeprefix("medusa_heads.").replace("lm_head", "0.output")] = tensor
        else:
            weights[name] = tensor
    return weights


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return f"{_LAYER}{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name

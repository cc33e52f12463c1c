"""The weights of a checkpoint: whole, of a kind that is computed here, and sound once they are loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specdec.runner.files import refuse_pointer

log = logging.getLogger(__name__)

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names in safetensors files of the dtypes that can be served."""

_PLAIN = {*DTYPES, "F64"}


def check_files(files: Iterable[Path], quantised: bool = False) -> str:
    """The dtype of the first plain weight, as safetensors calls it. Raises ValueError, with the file's name, if a file
    cannot be read, or has quantised weights where they are not taken."""
    first = ""
    for file in files:
        refuse_pointer(file)
        try:
            dtypes = _dtypes(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is no safetensors file that can be read: {error}") from error
        for name, dtype in dtypes.items():
            if not quantised and name.endswith("weight") and dtype not in _PLAIN:
                raise ValueError(refusal(f"such as {name} in {dtype}"))
            first = first or (dtype if dtype in _PLAIN else "")
    return first


def refusal(kind: str) -> str:
    return (
        f"its weights are quantised ({kind}), and this engine takes plain weights alone (float32, bfloat16 or float16):"
        " use a checkpoint of this model that is not quantised, or --engine vllm"
    )


def check_loaded(model: torch.nn.Module, findings: Mapping[str, Any]) -> None:
    """Raises ValueError, with a weight's name, if transformers had to make up a weight, or if one is not finite.

    ``findings`` is the loading info of ``from_pretrained``.
    """
    if different := sorted(findings["mismatched_keys"]):
        name, stored, expected = different[0]
        raise ValueError(
            f"{len(different)} weights differ in shape from what config.json asks for, such as {name}:"
            f" {list(stored)} instead of {list(expected)}"
        )
    if missing := sorted(findings["missing_keys"]):
        raise ValueError(f"the checkpoint lacks weights: {_listed(missing)}")
    if unused := sorted(findings["unexpected_keys"]):
        log.warning("the model does not use all weights", extra={"unused": _listed(unused)})
    if unsound := [name for name, weight in model.named_parameters() if not _is_finite(weight)]:
        dtype = str(model.get_parameter(unsound[0]).dtype).removeprefix("torch.")
        raise ValueError(f"weights are NaN or infinite in {dtype}: {_listed(unsound)}")


def _listed(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


def _dtypes(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118


def _is_finite(weight: torch.Tensor) -> bool:
    # The extremes are NaN if any number is; isfinite would make a copy.
    return weight.numel() == 0 or all(bool(extreme.isfinite()) for extreme in weight.detach().aminmax())

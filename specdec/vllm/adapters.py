"""LoRA adapters in peft's format: what they need of vLLM, and their part of a model's identity. Imports no vllm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from specdec.core.settings import VllmSettings
from specdec.runner.checkpoint import file_hash
from specdec.runner.files import ADAPTER, read_json, refuse_pointer

_WEIGHTS = "adapter_model.safetensors"
_MAX_ADAPTERS = 64
"""Each has its place in the memory of the device, as large as the adapter of the highest rank."""
_MAX_NAME = 256

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those for which vLLM makes places."""

_VOCABULARY = ("embed_tokens", "lm_head")
"""Modules that are not only used for the rows of a pass: for logprobs of prompts, too, and by heads."""


def arguments(settings: VllmSettings, on_cpu: bool) -> dict[str, Any]:
    """What vLLM is to make room for. Raises ValueError, with a message for the operator, if one cannot be used."""
    directories = settings.adapters
    if len(directories) > _MAX_ADAPTERS:
        raise ValueError(f"at most {_MAX_ADAPTERS} adapters are served, not {len(directories)}")
    for name in directories:
        if not name.strip() or len(name) > _MAX_NAME:
            raise ValueError(f"the name of an adapter must have 1 to {_MAX_NAME} characters: {name[:_MAX_NAME]!r}")
    folders = [Path(directory) for directory in directories.values()]
    highest = max(map(_rank, folders))
    return {
        "enable_lora": True,
        # On CPUs vLLM adds what is in the last place to texts without an adapter: it must be empty.
        "max_loras": len(folders) + on_cpu,
        "max_lora_rank": next((rank for rank in _RANKS if rank >= highest), highest),
        "lora_target_modules": sorted(set().union(*map(_modules, folders))),
        # At least a row for each draft token of each sequence: vLLM demands it. 2048 is its usual number.
        "max_num_batched_tokens": max(2048, settings.max_num_seqs * (settings.num_speculative_tokens + 1)),
    }


def identity(directories: Mapping[str, str]) -> dict[str, list[str]]:
    """The hashes of the files of each."""
    return {
        name: [file_hash(Path(directory) / file) for file in (ADAPTER, _WEIGHTS)]
        for name, directory in directories.items()
    }


def _rank(directory: Path) -> int:
    if not (directory / ADAPTER).is_file():
        raise ValueError(f"{directory} is no adapter: it has no {ADAPTER}")
    config = read_json(directory / ADAPTER)
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise ValueError(f"{directory / ADAPTER} has no rank (r), a positive integer")
    return int(max(ranks))


def _modules(directory: Path) -> set[str]:
    """The last part of the name of each module that it changes."""
    file = directory / _WEIGHTS
    if not file.is_file():
        raise ValueError(f"{directory} has no {_WEIGHTS}")
    refuse_pointer(file)
    try:
        with safe_open(file, "pt") as tensors:
            paths = [name.partition(".lora_")[0] for name in tensors.keys()]  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    modules = {path.rpartition(".")[2] for path in paths} | {"experts" for path in paths if ".experts" in path}
    if changed := modules.intersection(_VOCABULARY):
        raise ValueError(f"{directory} changes {', '.join(sorted(changed))}, which adapters must leave as they are")
    return modules

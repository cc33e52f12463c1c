"""What a folder of adapters must have, and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec.core.settings import VllmSettings
from specdec.vllm import adapters

LAYER = "base_model.model.model.layers.0"


def adapter(directory: Path, module: str = "self_attn.q_proj", **config: Any) -> str:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"r": 4, **config}))
    tensors = {f"{LAYER}.{module}.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    save_file(tensors, directory / "adapter_model.safetensors")
    return str(directory)


def test_vllm_makes_room_for_the_adapters_that_there_are(tmp_path: Path) -> None:
    folders = {
        "sql": adapter(tmp_path / "sql", rank_pattern={"q_proj": 20}),
        "poems": adapter(tmp_path / "poems", "mlp.experts.3.up_proj", r=9),
    }
    settings = VllmSettings(adapters=folders, max_num_seqs=500, num_speculative_tokens=9)
    assert adapters.arguments(settings, on_cpu=False) == {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 32,
        "lora_target_modules": ["experts", "q_proj", "up_proj"],
        "max_num_batched_tokens": 5000,
    }
    assert adapters.arguments(settings, on_cpu=True)["max_loras"] == 3


def test_names_and_contents_are_the_identity(tmp_path: Path) -> None:
    one, same = adapter(tmp_path / "one"), adapter(tmp_path / "same")
    others = [adapter(tmp_path / "alpha", lora_alpha=1), adapter(tmp_path / "module", "self_attn.k_proj")]
    identity = adapters.identity({"sql": one})
    assert identity == adapters.identity({"sql": same})
    for other in ({"poems": one}, {"sql": one, "poems": one}, *({"sql": folder} for folder in others)):
        assert adapters.identity(other) != identity


def empty(directory: Path) -> str:
    directory.mkdir()
    return str(directory)


def without_weights(directory: Path) -> str:
    (Path(adapter(directory)) / "adapter_model.safetensors").unlink()
    return str(directory)


def broken(directory: Path) -> str:
    (Path(adapter(directory)) / "adapter_model.safetensors").write_bytes(b"no tensors")
    return str(directory)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (empty, "is no adapter: it has no adapter_config.json"),
        (without_weights, "has no adapter_model.safetensors"),
        (broken, "adapter_model.safetensors cannot be read"),
        (lambda directory: adapter(directory, r="high"), r"has no rank \(r\), a positive integer"),
        (lambda directory: adapter(directory, "lm_head"), "changes lm_head"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_words(
    made: Callable[[Path], str], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=problem):
        adapters.arguments(VllmSettings(adapters={"sql": made(tmp_path / "it")}), on_cpu=True)


@pytest.mark.parametrize("names", [[""], ["x" * 257], [str(number) for number in range(65)]])
def test_names_have_limits(names: list[str], tmp_path: Path) -> None:
    folder = adapter(tmp_path / "it")
    with pytest.raises(ValueError, match=r"the name of an adapter|at most 64 adapters"):
        adapters.arguments(VllmSettings(adapters=dict.fromkeys(names, folder)), on_cpu=True)

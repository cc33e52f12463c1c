"""A head as a folder: its kind's config.json and weights, with a model card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from models.training.heads.base import Head


@dataclass(frozen=True)
class Card:
    """What a model card says."""

    title: str
    target: str
    data: str
    minutes: float
    device: str
    answers: int
    tokens: int
    tokens_seen: int
    share: float
    acceptance: list[float]

    def text(self) -> str:
        steps = " | ".join(str(step) for step in range(1, len(self.acceptance) + 1))
        rates = " | ".join(f"{rate:.2f}" for rate in self.acceptance)
        return f"""# {self.title} head for {self.target}

A draft for speculative decoding that reads the target's states. Serve it with its target:
`specdec serve target --model TARGET --head DIRECTORY`.

Trained for {self.minutes:.0f} minutes ({self.device}) on {self.answers} answers of {self.tokens} tokens that the target
wrote itself to questions of `{self.data}` (`specdec train head`); {self.tokens_seen} tokens seen. The head can draw
{self.share:.1%} of the answers' tokens.

How often its most likely token is the text's, on answers that it did not learn from, where all before were right:

| step | {steps} |
|---|{"---|" * len(self.acceptance)}
| right | {rates} |
"""


def save(head: Head, config: Any, ids: Tensor, *, card: Card, directory: Path, tied: bool = False) -> None:
    """Write config.json, model.safetensors in bfloat16 and README.md. ``tied``: the output's rows, which are the
    target's, are left out."""
    head_config, tensors = head.files(config, ids, tied)
    weights = {name: _stored(value) for name, value in (head.state_dict() | tensors).items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**head_config, "dtype": "bfloat16"}, indent=2) + "\n")
    (directory / "README.md").write_text(card.text())


def _stored(value: Tensor) -> Tensor:
    value = value.detach().cpu().contiguous()
    return value.bfloat16() if value.is_floating_point() else value

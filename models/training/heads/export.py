"""A head as a folder of SpecForge's names (https://github.com/sgl-project/SpecForge), with a model card.

The output's rows are the target's. They are written out unless the head is to be bundled (``tied``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.training.heads.eagle3 import Eagle3

_CONFIG_KEYS = (
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)


@dataclass(frozen=True)
class Card:
    """What a model card tells."""

    target: str
    data: str
    minutes: float
    device: str
    answers: int
    tokens: int
    tokens_seen: int
    share: float
    acceptance: list[float]


def save(
    head: Eagle3, config: Any, ids: Tensor, boundaries: Sequence[int], card: Card, directory: Path, tied: bool = False
) -> None:
    """Write config.json, model.safetensors in bfloat16 and README.md."""
    vocab_size = config.vocab_size
    weights = {name: value.detach().bfloat16().cpu().contiguous() for name, value in head.state_dict().items()}
    weights["d2t"] = ids.cpu() - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids.cpu(), True)
    if not tied:
        weights["lm_head.weight"] = head.output.bfloat16().cpu().contiguous()
    known = {key: getattr(config, key, None) for key in _CONFIG_KEYS}
    written = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: value for key, value in known.items() if value is not None},
        "num_hidden_layers": 1,
        "rope_theta": config.rope_parameters["rope_theta"],
        "draft_vocab_size": len(ids),
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        # SpecForge counts the outputs of layers, so that k - 1 is our boundary k.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in boundaries]},
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    (directory / "README.md").write_text(_card(card))


def _card(card: Card) -> str:
    steps = " | ".join(str(step) for step in range(1, len(card.acceptance) + 1))
    rates = " | ".join(f"{rate:.2f}" for rate in card.acceptance)
    return f"""# EAGLE-3 head for {card.target}

A draft for speculative decoding that reads the target's states. Serve it beside its target:
`specdec serve target --model TARGET --head DIRECTORY`.

Trained for {card.minutes:.0f} minutes ({card.device}) on {card.answers} answers of {card.tokens} tokens that the target
wrote itself to questions of `{card.data}` (`specdec train head`); {card.tokens_seen} tokens seen. The head can draw
{card.share:.1%} of the answers' tokens.

How often its likeliest token is the text's, on answers that it did not learn from, where all before were right:

| step | {steps} |
|---|{"---|" * len(card.acceptance)}
| right | {rates} |
"""

"""A checkpoint made of another model's first layers, all of them or some. Reads GGUF through transformers.

The weights become plain float32, because GGUF stores blocks of a few bits that only GGUF's own readers know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def read_gguf(file: Path) -> tuple[PreTrainedModel, Any]:
    """The model in float32, and its tokenizer. Raises what transformers raises, ImportError without gguf."""
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The embedding, the first ``num_layers`` layers, the last norm and the head of ``model``."""
    known: Any = model.config.to_dict()
    known.pop("quantization_config", None)  # it tells of the file that was read
    config = type(model.config)(**{**known, "num_hidden_layers": num_layers})
    made: PreTrainedModel = type(model)(config)
    weights = model.state_dict()
    made.load_state_dict({name: weights[name] for name in made.state_dict()})
    made.generation_config = model.generation_config
    return made

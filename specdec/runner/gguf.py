"""A GGUF file as a plain checkpoint, through transformers.

The weights become float32, because GGUF stores blocks of a few bits that only GGUF's own readers know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def read_gguf(file: Path) -> tuple[PreTrainedModel, Any]:
    """The model in float32, and its tokenizer. Raises what transformers raises, ImportError without gguf."""
    read: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return plain(read), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def plain(model: Any) -> PreTrainedModel:
    """The same model with a configuration without the traces of the file that was read."""
    known = model.config.to_dict()
    known.pop("quantization_config", None)
    copy: PreTrainedModel = type(model)(type(model.config)(**known))
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    return copy

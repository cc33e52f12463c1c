"""The shapes of the models, and their checkpoints on disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from models.training import tokenizer as bpe


@dataclass(frozen=True)
class Shape:
    """The parameters that differ between the models."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int


SHAPES = {
    "target": Shape(hidden=320, layers=8, heads=5, feed_forward=864),
    "draft": Shape(hidden=128, layers=2, heads=2, feed_forward=352),
    # Not bundled: what a smaller and a larger draft would be worth (docs/choosing-a-draft.md).
    "draft-small": Shape(hidden=64, layers=1, heads=1, feed_forward=176),
    "draft-large": Shape(hidden=256, layers=4, heads=4, feed_forward=704),
}


def build(name: str, end_of_text: int, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model."""
    shape = SHAPES[name]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=bpe.VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=bpe.CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def project_embedding(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Initialise the draft's embedding from the principal directions of the target's.

    The scale is that of the random initialisation. The square root reduces the differences between the directions.
    """
    own, wide = draft.model.embed_tokens.weight, target.model.embed_tokens.weight
    left, singular, _ = torch.linalg.svd(wide.float().cpu(), full_matrices=False)
    projected = left[:, : own.shape[1]] * singular[: own.shape[1]].sqrt()
    own.copy_(projected * (draft.config.initializer_range / projected.square().mean().sqrt()))


def parameters(model: LlamaForCausalLM) -> int:
    """The number of parameters; the tied embedding counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a bfloat16 checkpoint with its tokenizer; each file is replaced atomically."""
    staging = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    end_of_text = bpe.end_of_text(tokenizer)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.bfloat16()
    special = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    copy.generation_config = GenerationConfig.from_dict(special)
    copy.save_pretrained(staging)
    bpe.save(tokenizer, staging)
    directory.mkdir(parents=True, exist_ok=True)
    for file in staging.iterdir():
        file.chmod(0o644)
        file.replace(directory / file.name)
    staging.rmdir()


def load(directory: Path) -> LlamaForCausalLM:
    """A saved model in float32, ready for evaluation."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.train(False)
    return model

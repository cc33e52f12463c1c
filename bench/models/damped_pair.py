"""The damped pair: random Llama weights with upper layers of little effect, and a draft made of the lower layers.

It is a model of costs: the target takes the time of a model of its size, and about four in five draft tokens are
accepted. It does not model text or the acceptance of real drafts.

Knows shapes and files; does not know the measurements. The pair is two safetensors checkpoints with a tokenizer, so it
is loaded like any other model.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Shape:
    """The target's shape. The draft has its embedding, its first ``draft_layers`` layers, last norm and head."""

    vocab_size: int = 8192
    hidden: int = 1024
    layers: int = 24
    draft_layers: int = 2
    heads: int = 16
    kv_heads: int = 4
    feed_forward: int = 2816
    context_length: int = 8192
    damping: float = 0.03
    """The factor on the residual outputs of the layers that the draft lacks. 1: unrelated models, 0: equal models.
    0.03 gives a greedy acceptance of about 0.8 with the defaults above (0.78 over greedy texts, 0.02 gives 0.83)."""
    seed: int = 0

    def config(self, layers: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.context_length,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two checkpoint directories."""

    target: Path
    draft: Path


def damped_pair(directory: Path, shape: Shape | None = None) -> Pair:
    """The pair below ``directory``. Generates it if it does not exist (some seconds, 2 bytes per parameter)."""
    shape = shape or Shape()
    home = directory / f"damped-{hashlib.sha256(repr(shape).encode()).hexdigest()[:12]}"
    pair = Pair(home / "target", home / "draft")
    if not home.is_dir():
        staging = home.with_name(f".{home.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        target = _target(shape)
        for model, name in ((target, "target"), (_draft(target, shape), "draft")):
            model.save_pretrained(staging / name)
            _tokenizer(shape.vocab_size).save(str(staging / name / "tokenizer.json"))
        staging.rename(home)  # atomic
    return pair


def _target(shape: Shape) -> LlamaForCausalLM:
    torch.manual_seed(shape.seed)
    model = LlamaForCausalLM(shape.config(shape.layers))
    with torch.no_grad():
        for layer in model.model.layers[shape.draft_layers :]:
            layer.self_attn.o_proj.weight.mul_(shape.damping)
            layer.mlp.down_proj.weight.mul_(shape.damping)
    torch.nn.Module.to(model, torch.bfloat16)  # transformers hides the signature
    return model


def _draft(target: LlamaForCausalLM, shape: Shape) -> LlamaForCausalLM:
    draft = LlamaForCausalLM(shape.config(shape.draft_layers))
    torch.nn.Module.to(draft, torch.bfloat16)
    weights: dict[str, Tensor] = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    return draft


def _tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer with one word per id: w0 w1 w2 ..."""
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer

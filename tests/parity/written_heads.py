"""Heads of random weights beside the demo target, as folders of the field, and texts with own trees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from target_service.heads.checkpoint import read_head
from target_service.heads.own_trees import OwnTrees
from target_service.heads.recurrent import RecurrentHead
from target_service.language_model import LmVerifier
from target_service.verifier import Decision, Job

HIDDEN, HEADS, HEAD_DIM, DRAFT_VOCAB = 320, 5, 64, 600
BOUNDARIES = (2, 4, 5)


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Of a head beside the demo target, under SpecForge's names."""
    made = torch.Generator().manual_seed(seed)

    def of(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made) / shape[-1] ** 0.5

    heads = HEADS * HEAD_DIM
    found = {f"midlayer.self_attn.{name}_proj.weight": of(heads, 2 * HIDDEN) for name in "qkv"}
    found |= {"midlayer.self_attn.o_proj.weight": of(HIDDEN, heads), "fc.weight": of(HIDDEN, 3 * HIDDEN)}
    found |= {f"midlayer.mlp.{name}_proj.weight": of(256, HIDDEN) for name in ("gate", "up")}
    found |= {"midlayer.mlp.down_proj.weight": of(HIDDEN, 256), "lm_head.weight": of(DRAFT_VOCAB, HIDDEN)}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    found |= {f"{name}.weight": 1 + 0.1 * of(HIDDEN) for name in norms}
    ids = torch.randperm(4096, generator=made)[:DRAFT_VOCAB].sort().values
    found["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    found["t2d"] = torch.zeros(4096, dtype=torch.bool).index_fill_(0, ids, True)
    return found


def eagle_weights(seed: int = 2) -> dict[str, Tensor]:
    """Of an EAGLE-1 head, as its authors write it: no norm before its layer and none behind."""
    made = torch.Generator().manual_seed(seed)

    def of(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made) / shape[-1] ** 0.5

    heads = HEADS * HEAD_DIM
    found = {f"layers.0.self_attn.{name}_proj.weight": of(heads, HIDDEN) for name in "qkv"}
    found |= {"layers.0.self_attn.o_proj.weight": of(HIDDEN, heads), "fc.weight": of(HIDDEN, 2 * HIDDEN)}
    found |= {f"layers.0.mlp.{name}_proj.weight": of(256, HIDDEN) for name in ("gate", "up")}
    found |= {"layers.0.mlp.down_proj.weight": of(HIDDEN, 256), "fc.bias": of(HIDDEN)}
    found |= {"layers.0.self_attn.q_proj.bias": of(heads), "embed_tokens.weight": of(10, HIDDEN)}
    return found | {"layers.0.post_attention_layernorm.weight": 1 + 0.1 * of(HIDDEN)}


CONFIG = {"num_attention_heads": HEADS, "head_dim": HEAD_DIM, "hidden_size": HIDDEN, "rms_norm_eps": 1e-5}
LAYERS = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}


def folder(at: Path, kind: str, tensors: dict[str, Tensor]) -> Path:
    """A head as one of its sources writes it."""
    config: dict[str, Any] = {**CONFIG, "rope_theta": 5000.0}
    if kind == "original":  # without layer numbers, as a pickle
        torch.save(tensors, at / "pytorch_model.bin")
    elif kind == "SpecForge":
        config |= {"eagle_config": LAYERS}
        save_file(tensors, at / "model.safetensors")
    elif kind == "speculators":
        config = {"transformer_layer_config": {**CONFIG, "rope_parameters": {"rope_theta": 5000.0}}, **LAYERS}
        renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        save_file(renamed, at / "model.safetensors")
    else:
        config |= LAYERS
        save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, at / "model.safetensors")
    (at / "config.json").write_text(json.dumps(config))
    return at


def own_trees(runner: ModelRunner, at: Path, tensors: dict[str, Tensor]) -> OwnTrees:
    files = read_head(folder(at, "SpecForge", tensors))
    head = RecurrentHead(files, runner.model, runner.info.vocab_size, runner.backend)
    return OwnTrees(head, runner.tap(BOUNDARIES), runner, 8)


def chain(ids: Sequence[int], cache: SequenceCache) -> Segment:
    """All ids as the rows of a pass."""
    return Segment(ids, range(-1, len(ids) - 1), 0, cache.block_table, (), exact=False)


class Text:
    """A sequence that a verifier decodes, with own trees of at most ``own`` nodes."""

    def __init__(self, verifier: LmVerifier, prompt: Sequence[int], own: int, temperature: float = 0.0) -> None:
        self.verifier, self.own, self.ids = verifier, own, list(prompt)
        spec = SequenceSpec(list(prompt), len(prompt), SamplingParams(temperature), 9, Method.COUPLED, b"own")
        self.memory = verifier.open(spec)
        self.trees: list[TokenTree] = []

    def step(self, tree: TokenTree = EMPTY_TREE) -> None:
        [decision], _ = self.verifier.verify([Job(self.memory, self.ids, tree, max_own=64, own=self.own)])
        if decision is None:
            return
        assert isinstance(decision, Decision)
        tree = decision.own or tree
        self.trees.append(decision.own)
        self.ids += [*(tree.token_ids[node] for node in decision.accepted), decision.next_token]

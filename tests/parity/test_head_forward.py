"""A head computes what was published."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.runner.model_runner import ModelRunner
from target_service.heads.checkpoint import read_head
from target_service.heads.layer_head import LayerHead
from target_service.heads.recurrent import RecurrentHead
from target_service.language_model import LmVerifier
from target_service.self_draft.trees import SelfDraftTrees
from tests.parity.written_heads import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    Text,
    chain,
    eagle_weights,
    folder,
)

pytestmark = pytest.mark.slow


@torch.inference_mode()
@pytest.mark.parametrize("state_first", [False, True])
def test_the_forward_pass_of_eagle_is_the_published_one(
    target_runner: ModelRunner, tmp_path: Path, device: str, state_first: bool
):
    if device != "cpu":
        pytest.skip("the formulas are computed on the CPU")
    raw = {name.removeprefix("layers.0."): tensor for name, tensor in eagle_weights().items()}
    files = read_head(folder(tmp_path, "original", eagle_weights()))
    assert (files.kind, files.layers, files.ids) == ("eagle", (), None)
    model = target_runner.model
    head = RecurrentHead(files, model, target_runner.info.vocab_size, target_runner.backend)
    head.other_reading = state_first
    assert head.num_taps == 1
    ids = [5, 90, 7, 1200, 33]
    states = torch.randn(len(ids), HIDDEN, generator=torch.Generator().manual_seed(3))
    cache = target_runner.new_cache()
    cache.take(len(ids))
    packed_pass = target_runner.packed_pass([chain(ids, cache)])
    found = head.logits(head.rows(ids, states, packed_pass, layer=8))
    cache.release()

    embedded = model.get_input_embeddings().weight[torch.tensor(ids)]
    pair = (states, embedded) if state_first else (embedded, states)
    x = torch.cat(pair, -1) @ raw["fc.weight"].T + raw["fc.bias"]
    query, key, value = ((x @ raw[f"self_attn.{name}_proj.weight"].T) for name in "qkv")
    query = query + raw["self_attn.q_proj.bias"]
    query, key, value = (each.view(len(ids), HEADS, HEAD_DIM).transpose(0, 1) for each in (query, key, value))
    angles = torch.arange(len(ids))[:, None] * 5000.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))

    def turned(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    mixed = torch.nn.functional.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
    x = x + mixed.transpose(0, 1).reshape(len(ids), -1) @ raw["self_attn.o_proj.weight"].T
    inner = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * raw["post_attention_layernorm.weight"]
    gated = torch.nn.functional.silu(inner @ raw["mlp.gate_proj.weight"].T) * (inner @ raw["mlp.up_proj.weight"].T)
    x = x + gated @ raw["mlp.down_proj.weight"].T
    assert torch.allclose(found, x @ model.get_output_embeddings().weight.T, atol=1e-3)


def test_an_eagle_head_reads_the_targets_last_state(
    target_runner: ModelRunner, tmp_path: Path, prompts: list[list[int]]
):
    """The state after the last norm is the input of the output embedding."""
    files = read_head(folder(tmp_path, "original", eagle_weights()))
    head = RecurrentHead(files, target_runner.model, target_runner.info.vocab_size, target_runner.backend)
    own = SelfDraftTrees(LayerHead(head, target_runner.tap((8,)), target_runner, layer=8))
    cache, ids = target_runner.new_cache(), prompts[0][:9]
    cache.take(len(ids))
    rows = dataclasses.replace(chain(ids, cache), logit_rows=range(len(ids)))
    with own.taps.open():
        [outputs] = target_runner.forward([rows])
    embedding = target_runner.model.get_output_embeddings()
    assert torch.equal(embedding(own.taps.take(len(ids)))[:, : outputs.logits.shape[1]], outputs.logits)
    cache.release()
    text = Text(LmVerifier(target_runner, own), prompts[0][:12], 4)
    for _ in range(4):
        text.step()
    assert all(len(tree) == 4 for tree in text.trees[1:])
    text.verifier.close(text.state)
    own.taps.remove()


def test_a_head_that_repeats_the_targets_last_state_says_the_token_that_was_just_fed(
    target_runner: ModelRunner, tmp_path: Path, prompts: list[list[int]]
) -> None:
    """Its row r gives the target's output at r - 1, so at each depth it proposes the greedy text's last token. A state
    or a row that is off by one would give another."""
    tensors = eagle_weights()
    tensors["fc.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], -1)
    for name in ("fc.bias", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        tensors[name].zero_()
    files = read_head(folder(tmp_path, "original", tensors))
    head = RecurrentHead(files, target_runner.model, target_runner.info.vocab_size, target_runner.backend)
    own = SelfDraftTrees(LayerHead(head, target_runner.tap((8,)), target_runner, layer=8))
    text = Text(LmVerifier(target_runner, own), prompts[1][:14], 3)
    text.step()
    for _ in range(6):
        last = text.ids[-1]
        text.step()
        tree = text.trees[-1]
        assert tree.token_ids[0] == last
        assert all(tree.token_ids[node] == last for node in tree.most_likely_chains())
    text.verifier.close(text.state)
    own.taps.remove()

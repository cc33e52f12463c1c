"""A head is read from each folder in the field, and computes what its folder says, or is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from specdec.runner.model_runner import ModelRunner
from target_service.heads.checkpoint import read_head
from target_service.heads.recurrent import RecurrentHead
from tests.parity.written_heads import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    chain,
    folder,
    medusa_weights,
    weights,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["original", "SpecForge", "speculators", "ModelOpt"])
def test_a_folder_of_each_source_gives_the_same_head(kind: str, tmp_path: Path):
    files = read_head(folder(tmp_path, kind, weights()))
    expected = weights()
    ids = expected.pop("d2t") + torch.arange(DRAFT_VOCAB)
    del expected["t2d"]
    assert files.ids is not None
    assert torch.equal(files.ids, ids)
    assert files.weights.keys() == expected.keys()
    assert all(torch.equal(files.weights[name], tensor) for name, tensor in expected.items())
    assert files.layer is not None
    assert torch.allclose(files.layer.rates, 5000.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    assert files.layers == (() if kind == "original" else (1, 3, 4))


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        ("no config", "config.json cannot be read"),
        ("no weights", "none of model.safetensors, medusa_lm_head.safetensors,"),
        ("another head", "it has no fc.weight"),
        ("neither", "it has no midlayer.self_attn.q_proj.weight"),
        ("more", "blocks.0.weight, which is not supported"),
        ("no tensors", "cannot be read"),
    ],
)
def test_a_folder_without_a_known_head_is_refused_in_one_sentence(spoilt: str, words: str, tmp_path: Path):
    tensors = weights()
    if spoilt == "neither":
        tensors = {"speculator.proj.0.weight": torch.zeros(4, 4)}
    if spoilt == "another head":
        del tensors["fc.weight"]
    if spoilt == "more":
        tensors["blocks.0.weight"] = torch.zeros(1)
    folder(tmp_path, "SpecForge", tensors)
    if spoilt == "no config":
        (tmp_path / "config.json").unlink()
    if spoilt == "no weights":
        (tmp_path / "model.safetensors").unlink()
    if spoilt == "no tensors":
        (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ValueError, match=words):
        read_head(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "is not a JSON object"),
        ({"eagle_config": []}, None),
        ({"eagle_config": [1]}, "are not objects"),
        ({"transformer_layer_config": "x"}, "are not objects"),
        ({"eagle_aux_hidden_state_layer_ids": "abc"}, "no list of numbers"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "no list of numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, None]}, "no list of numbers"),
        ({"medusa_choices": 5}, "a static tree is a list of paths"),
        ({"num_attention_heads": None}, "no num_attention_heads"),
        ({"num_attention_heads": "five"}, "expected int"),
        ({"head_dim": -64}, "no head that can be used"),
        ({"rms_norm_eps": []}, "expected float"),
        ({"rope_scaling": "linear"}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling is dynamic, which is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "by type of layer, which is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor, which is not supported"),
        ({"hidden_act": "of tomorrow"}, "hidden_act is of tomorrow, which is not supported"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide'"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_computed_is_refused_in_one_sentence(config: Any, words: str | None, tmp_path: Path):
    at = folder(tmp_path, "original", weights())
    said = config if isinstance(config, list) else {**json.loads((at / "config.json").read_text()), **config}
    (at / "config.json").write_text(json.dumps(said))
    if words is None:
        assert read_head(at).layers == ()
        return
    with pytest.raises(ValueError, match=words) as refused:
        read_head(at)
    assert str(refused.value).startswith(f"{at} holds no head that can be used: ")


ROPES = {
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
NAMED: dict[str, dict[str, Any]] = {
    **{name: {"rope_scaling": rope, "max_position_embeddings": 512} for name, rope in ROPES.items()},
    "gelu": {"hidden_act": "gelu"},
    "window": {"sliding_window": 3},
    "no window": {"sliding_window": 3, "use_sliding_window": False},
    "one norm of taps": {},
    "norms of taps": {},
    "EAGLE 3.1": {"norm_output": True, "speculators_model_type": "eagle3"},
    "no last norm": {"norm_output": False},
    "own embedding": {},
}


def plain(
    config: dict[str, Any],
    raw: dict[str, Tensor],
    embedding: Tensor,
    ids: Sequence[int],
    taps: Tensor,
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The logits of all rows and the states that the next ones get, computed at once with transformers' rotation.
    ``own``: states that rows get in place of those of the taps."""

    def normed(x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in raw:
            return x
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * raw[f"{name}.weight"]

    def heads(name: str, x: Tensor) -> Tensor:
        return (x @ raw[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(ids), HEADS, HEAD_DIM).transpose(0, 1)

    parts = normed(taps, "input_norm").chunk(3, -1)
    state = torch.cat([normed(part, f"fc_norm.{k}") for k, part in enumerate(parts)], -1) @ raw["fc.weight"].T
    state = state if own is None else own
    embedded = raw.get("embed_tokens.weight", embedding)[torch.tensor(ids)]
    wide = torch.cat([normed(embedded, "midlayer.input_layernorm"), normed(state, "midlayer.hidden_norm")], -1)
    sizes = {"num_attention_heads": HEADS, "head_dim": HEAD_DIM, "hidden_size": HIDDEN}
    known = {name: config[name] for name in ("rope_theta", "rope_scaling", "max_position_embeddings") if name in config}
    rotary = modeling_llama.LlamaRotaryEmbedding(LlamaConfig(**sizes, **json.loads(json.dumps(known))))
    cos, sin = rotary(wide[None], torch.arange(len(ids))[None])
    query, key = modeling_llama.apply_rotary_pos_emb(heads("q", wide)[None], heads("k", wide)[None], cos, sin)
    sees = torch.ones(len(ids), len(ids)).tril().bool()
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        sees &= torch.ones_like(sees).triu(1 - config["sliding_window"])
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, heads("v", wide)[None], attn_mask=sees)
    state = state + mixed[0].transpose(0, 1).reshape(len(ids), -1) @ raw["midlayer.self_attn.o_proj.weight"].T
    inner = normed(state, "midlayer.post_attention_layernorm")
    gate, up = (inner @ raw[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    acted = torch.nn.functional.gelu(gate) if config.get("hidden_act") == "gelu" else torch.nn.functional.silu(gate)
    state = state + (acted * up) @ raw["midlayer.mlp.down_proj.weight"].T
    last = state if config.get("norm_output") is False else normed(state, "norm")
    return last @ raw["lm_head.weight"].T, last if config.get("norm_output") else state


@torch.inference_mode()
@pytest.mark.parametrize("name", NAMED)
def test_a_head_computes_what_its_folder_says(target_runner: ModelRunner, tmp_path: Path, device: str, name: str):
    """And something else than without."""
    if device != "cpu":
        pytest.skip("the formulas are computed on the CPU")
    raw, wide = weights(), 1 + torch.rand(3 * HIDDEN, generator=torch.Generator().manual_seed(8))
    if name == "one norm of taps":
        raw["input_norm.weight"] = wide
    if name == "norms of taps":
        raw |= {f"fc_norm.{k}.weight": part for k, part in enumerate(wide.chunk(3))}
    if name == "own embedding":
        raw["embed_tokens.weight"] = torch.randn(4096, HIDDEN, generator=torch.Generator().manual_seed(9))
    at = folder(tmp_path, "original", raw)
    silent = json.loads((at / "config.json").read_text())
    config = silent | NAMED[name]
    (at / "config.json").write_text(json.dumps(config))
    model, ids = target_runner.model, [5, 90, 7, 1200, 33, 7, 7, 4000, 12, 88]
    head = RecurrentHead(read_head(at), model, target_runner.info.vocab_size, target_runner.backend)
    taps = torch.randn(len(ids), 3 * HIDDEN, generator=torch.Generator().manual_seed(3))
    embedding = model.get_input_embeddings().weight
    cache = target_runner.new_cache()
    cache.take(len(ids))
    packed_pass = target_runner.packed_pass([chain(ids, cache)])
    states, own = head.fused(taps), None
    for _ in range(2):  # with the target's states, then with its own
        states = head.rows(ids, states, packed_pass, layer=8)
        expected, own = plain(config, raw, embedding, ids, taps, own)
        assert torch.allclose(head.logits(states), expected, atol=1e-3)
    cache.release()
    if name != "no window":
        unnamed = (silent, weights(), embedding, ids, taps)
        second, _ = plain(*unnamed, plain(*unnamed)[1])
        assert not torch.allclose(second, expected, atol=1e-2)


def test_a_copy_of_the_targets_embedding_takes_no_memory(target_runner: ModelRunner, tmp_path: Path):
    model = target_runner.model
    copied = model.get_input_embeddings().weight.detach().clone()
    files = read_head(folder(tmp_path, "original", weights() | {"embed_tokens.weight": copied}))
    head = RecurrentHead(files, model, target_runner.info.vocab_size, target_runner.backend)
    assert head.embedding is model.get_input_embeddings()


def test_heads_inside_a_model_in_several_files_are_read(tmp_path: Path):
    tensors = {f"medusa_heads.{name}": tensor for name, tensor in medusa_weights().items()}
    names = sorted(tensors)
    of_model = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)}
    shards = [{name: tensors[name] for name in names[:5]} | of_model, {name: tensors[name] for name in names[5:]}]
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, tmp_path / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    found = read_head(tmp_path)
    (alone := tmp_path / "alone").mkdir()
    expected = read_head(folder(alone, "SpecForge", medusa_weights()))
    assert found.kind == "medusa"
    assert found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in expected.weights.items())

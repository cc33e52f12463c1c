"""A head is read from each folder in the field, computes what was published, and is proved by its target's own text."""

from __future__ import annotations

import dataclasses
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

from specdec.backends.taps import Taps
from specdec.runner.model_runner import ModelRunner
from target_service.heads import own_texts, proof
from target_service.heads.checkpoint import read_head
from target_service.heads.layer_head import LayerHead
from target_service.heads.recurrent import RecurrentHead
from target_service.language_model import LmVerifier
from target_service.own.own_trees import OwnTrees
from tests.checkout import DEMO
from tests.parity.written_heads import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    Text,
    chain,
    eagle_weights,
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
        states = head.rows(ids, states, range(len(ids)), packed_pass, 8)
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


def network_of(own: OwnTrees) -> RecurrentHead:
    assert isinstance(own.head, LayerHead)
    return own.head.network


def reference(own: OwnTrees, embedding: Tensor, ids: Sequence[int], states: Tensor) -> Tensor:
    """The logits after each row, from the published formulas, position by position."""
    raw, half = weights(), HEAD_DIM // 2
    rates = 5000.0 ** (-torch.arange(half) / half)

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * raw[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        first, second, angle = x[..., :half], x[..., half:], position * rates
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)

    keys, values, found = [], [], []
    for position, token in enumerate(ids):
        state = states[position]
        wide = torch.cat([normed(embedding[token], "midlayer.input_layernorm"), normed(state, "midlayer.hidden_norm")])
        query, key, value = (
            (raw[f"midlayer.self_attn.{name}_proj.weight"] @ wide).view(HEADS, HEAD_DIM) for name in "qkv"
        )
        keys.append(turned(key, position))
        values.append(value)
        scores = torch.stack([(turned(query, position) * each).sum(-1) for each in keys]) / HEAD_DIM**0.5
        mixed = (scores.softmax(0)[..., None] * torch.stack(values)).sum(0).flatten()
        state = state + raw["midlayer.self_attn.o_proj.weight"] @ mixed
        inner = normed(state, "midlayer.post_attention_layernorm")
        gate, up = (raw[f"midlayer.mlp.{name}_proj.weight"] @ inner for name in ("gate", "up"))
        state = state + raw["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
        found.append(raw["lm_head.weight"] @ normed(state, "norm"))
    return torch.stack(found)


@torch.inference_mode()
def test_the_forward_pass_is_the_published_one(own: OwnTrees, target_runner: ModelRunner, device: str):
    if device != "cpu":
        pytest.skip("the formulas are computed on the CPU")
    ids = [5, 90, 7, 1200, 33, 7, 7, 4000]
    states = torch.randn(len(ids), HIDDEN, generator=torch.Generator().manual_seed(3))
    cache = target_runner.new_cache()
    cache.take(len(ids))
    packed_pass = target_runner.packed_pass([chain(ids, cache)])
    network = network_of(own)
    found = network.logits(network.rows(ids, states, range(len(ids)), packed_pass, 8))
    expected = reference(own, target_runner.model.get_input_embeddings().weight, ids, states)
    cache.release()
    assert torch.allclose(found, expected, atol=1e-4)


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
    found = head.logits(head.rows(ids, states, range(len(ids)), packed_pass, 8))
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
    own = OwnTrees(LayerHead(head, target_runner.tap((8,)), target_runner, 8))
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
    text.verifier.close(text.memory)
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
    own = OwnTrees(LayerHead(head, target_runner.tap((8,)), target_runner, 8))
    text = Text(LmVerifier(target_runner, own), prompts[1][:14], 3)
    text.step()
    for _ in range(6):
        last = text.ids[-1]
        text.step()
        tree = text.trees[-1]
        assert tree.token_ids[0] == last
        assert all(tree.token_ids[node] == last for node in tree.likeliest_chains())
    text.verifier.close(text.memory)
    own.taps.remove()


@pytest.mark.parametrize("right", [(2, 4, 5), (1, 3, 4)])
def test_the_reading_that_agrees_is_taken(
    target_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: tuple[int, ...]
):
    files = read_head(folder(tmp_path, "SpecForge", weights()))

    heads: list[RecurrentHead] = []

    def hits(_: Any, taps: Taps, *__: Any) -> Tensor:
        return torch.arange(100).repeat(2, 1) < (60 if taps.boundaries == right and heads[0].other_reading else 10)

    def made(*parts: Any) -> RecurrentHead:
        heads.append(RecurrentHead(*parts))
        return heads[-1]

    monkeypatch.setattr(proof, "_hits", hits)
    monkeypatch.setattr(proof, "RecurrentHead", made)
    found = proof.proved(files, target_runner)
    assert found.taps is not None
    found.taps.remove()
    assert found.taps.boundaries == right
    assert heads[0].other_reading


@pytest.mark.parametrize(("behind", "num_rounds"), [(2, 3), (30, 1), (0, 1)])
def test_readings_are_tried_on_more_texts_until_one_is_clearly_ahead(behind: int, num_rounds: int):
    """Or until they say the same. The one that is ahead is right on the tokens of the other and ``behind`` more."""
    tried: list[int] = []

    def hits(reading: Any, texts: Any) -> Tensor:
        return torch.arange(150).repeat(2, 1) < (80 if reading == "best" else 80 - behind)

    def texts(seed: int) -> list[Any]:
        tried.append(seed)
        return []

    readings: Any = ["best", "other"] if not behind else ["other", "best"]
    assert proof._best(readings, hits, texts) == ("best", pytest.approx(80 / 150))
    assert len(tried) == len(set(tried)) == num_rounds


def test_a_target_with_a_chat_template_answers_questions(target_runner: ModelRunner, tmp_path: Path):
    """A head is trained on answers. Without a template, texts begin where any text does."""
    prompts = own_texts.prompts_of(DEMO / "target", target_runner)
    assert len(set(map(tuple, prompts))) == len(prompts) > 1
    assert len({tuple(each) for each in own_texts.prompts_of(tmp_path, target_runner)}) == 1
    texts = own_texts.write(target_runner, prompts, 3)
    assert texts == own_texts.write(target_runner, prompts, 3)
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.ids[: text.start + 1] == prompt
        assert not set(text.ids[text.start + 1 :]) & set(target_runner.info.eos_token_ids)


def test_a_head_of_another_model_is_refused(target_runner: ModelRunner, tmp_path: Path):
    files = read_head(folder(tmp_path, "SpecForge", weights()))
    with pytest.raises(ValueError, match="is of another model: it agrees with"):
        proof.proved(files, target_runner)


def test_a_head_that_does_not_fit_is_refused(target_runner: ModelRunner, tmp_path: Path):
    tensors = weights()
    tensors["d2t"][-1] = 4096
    files = read_head(folder(tmp_path, "SpecForge", tensors))
    with pytest.raises(ValueError, match="tokens that the target does not have"):
        RecurrentHead(files, target_runner.model, target_runner.info.vocab_size, target_runner.backend)

"""Laws of heads: whatever a head says, the text is the target's; and what it says depends on the text alone.

Heads of random weights beside the demo target, written as the folders that are found in the field.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.kvcache.block_pool import SequenceCache
from specdec.runner.model_runner import ModelRunner
from target_service.heads import proof
from target_service.heads.checkpoint import read_head
from target_service.heads.own_trees import OwnTrees
from target_service.heads.recurrent import RecurrentHead
from target_service.heads.taps import Taps
from target_service.language_model import LmVerifier
from target_service.verifier import Decision, Job
from tests.checkout import DEMO
from tests.cluster import cluster

pytestmark = pytest.mark.slow

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
    return OwnTrees(head, Taps(runner.model, BOUNDARIES), runner, 8)


@pytest.fixture
def own(target_runner: ModelRunner, tmp_path: Path) -> Any:
    found = own_trees(target_runner, tmp_path, weights())
    yield found
    found.taps.remove()


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
    assert files.rope_theta == 5000.0
    assert files.layers == (() if kind == "original" else (1, 3, 4))


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        ("no config", "config.json cannot be read"),
        ("no weights", "neither model.safetensors nor"),
        ("another head", "it has no fc.weight"),
        ("Medusa", "it has no midlayer.self_attn.q_proj.weight"),
        ("more", "blocks.0.weight, which is not supported"),
        ("no tensors", "cannot be read"),
    ],
)
def test_a_folder_without_a_known_head_is_refused_in_one_sentence(spoilt: str, words: str, tmp_path: Path):
    tensors = weights()
    if spoilt == "Medusa":
        tensors = {"0.0.linear.weight": torch.zeros(4, 4)}
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
    packed_pass = target_runner.packed_pass([_chain(ids, cache)])
    found = own.head.logits(own.head.rows(ids, states, range(len(ids)), packed_pass, 8))
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
    packed_pass = target_runner.packed_pass([_chain(ids, cache)])
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
    own = OwnTrees(head, Taps(target_runner.model, (8,)), target_runner, 8)
    cache, ids = target_runner.new_cache(), prompts[0][:9]
    cache.take(len(ids))
    rows = dataclasses.replace(_chain(ids, cache), logit_rows=range(len(ids)))
    with own.taps.open():
        [outputs] = target_runner.forward([rows])
    assert torch.equal(own.taps.take(len(ids)), outputs.features)
    cache.release()
    text = Text(LmVerifier(target_runner, own), prompts[0][:12], 4)
    for _ in range(4):
        text.step()
    assert all(len(tree) == 4 for tree in text.trees[1:])
    text.verifier.close(text.memory)
    own.taps.remove()


def _chain(ids: Sequence[int], cache: SequenceCache) -> Any:
    from specdec.passes.rows import Segment

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


def next_tree(verifier: LmVerifier, ids: Sequence[int]) -> TokenTree:
    """The own tree after a text that is fed at once: its last id comes from a pass."""
    text = Text(verifier, ids[:-1], 0)
    text.step()
    text.ids[-1] = ids[-1]  # as if that had been drawn
    text.own = 6
    text.step()
    verifier.close(text.memory)
    return text.trees[-1]


def test_what_a_head_drafts_depends_on_the_text_alone(
    own: OwnTrees, target_runner: ModelRunner, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Fed at once, token by token, along accepted trees of others, after a replay, and after a shared prefix. Where a
    tree grows also depends on what was accepted before, which is not told here."""
    monkeypatch.setattr(own, "observe", lambda memory, accepted: None)
    verifier = LmVerifier(target_runner, own)
    for prompt in prompts[:3]:
        target_runner.pool.forget()
        text = Text(verifier, prompt[:20], 6)
        while len(text.ids) < 32:
            ahead = Text(verifier, text.ids, 0)
            ahead.step()
            verifier.close(ahead.memory)
            text.step()  # its own tree, mostly rejected
            text.own = 0
            text.step(TokenTree.chain([_peek(verifier, text.ids), 5]))  # a tree of which one node is accepted
            text.own = 6
        base = list(text.ids)
        text.step()
        found = text.trees[-1]
        verifier.close(text.memory)
        assert len(found) == 6
        target_runner.pool.forget()
        again = next_tree(verifier, base)
        assert again == found  # fed at once
        assert next_tree(verifier, base) == found  # most of it found in the cache


def _peek(verifier: LmVerifier, ids: Sequence[int]) -> int:
    text = Text(verifier, ids, 0)
    text.step()
    verifier.close(text.memory)
    return text.ids[-1]


@pytest.mark.parametrize("spoilt", ["random", "NaN", "infinite output"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_text_is_the_targets_whatever_the_head_says(
    target_runner: ModelRunner, prompts: list[list[int]], tmp_path: Path, spoilt: str, temperature: float
):
    tensors = weights(1)
    if spoilt == "NaN":
        tensors["midlayer.mlp.down_proj.weight"][3, 3] = float("nan")
    if spoilt == "infinite output":
        tensors["lm_head.weight"][7] = float("inf")
    head = own_trees(target_runner, tmp_path, tensors)
    rng = random.Random(1)
    asked: list[dict[str, Any]] = [
        {"token_ids": {"token_ids": prompt[: rng.randrange(4, 40)]}, "seed": rng.randrange(99), "max_tokens": 40}
        for prompt in prompts[:12]
    ]
    try:
        async with cluster([LmVerifier(target_runner, head)]) as running:

            async def text(fields: dict[str, Any], number: int | None) -> list[int]:
                fixed = {} if number is None else {"num_draft_tokens": number}
                [sample] = await running.client.generate(**fields, **fixed, temperature=temperature)
                return list(sample.token_ids)

            async def cancelled(fields: dict[str, Any]) -> None:
                stream = running.client.stream(**fields, num_draft_tokens=5)
                await anext(stream)
                await stream.aclose()

            alone = [await text(fields, 0) for fields in asked]
            leaving = [asyncio.create_task(cancelled(fields)) for fields in asked]
            numbers = [rng.choice((None, 1, 2, 4, 8, 16)) for _ in asked]
            found = await asyncio.gather(*(text(each, number) for each, number in zip(asked, numbers, strict=True)))
            await asyncio.gather(*leaving)
            assert found == alone
    finally:
        head.taps.remove()


def test_nothing_is_copied_while_no_head_is_asked(own: OwnTrees, target_runner: ModelRunner, prompts: list[list[int]]):
    verifier = LmVerifier(target_runner, own)
    spec = SequenceSpec(prompts[0][:12], 12, SamplingParams(0.0), 1, Method.COUPLED)
    memory, ids = verifier.open(spec), list(prompts[0][:12])
    for _ in range(3):
        [decision], timings = verifier.verify([Job(memory, ids, EMPTY_TREE)])
        assert isinstance(decision, Decision)
        ids.append(decision.next_token)
        assert timings.own_us == 0
    verifier.close(memory)
    assert own.taps.num_copied == 0


def test_slots_come_back_and_growths_take_none_from_texts(
    own: OwnTrees, target_runner: ModelRunner, prompts: list[list[int]]
):
    verifier, rng = LmVerifier(target_runner, own), random.Random(4)
    target_runner.pool.forget()
    before = target_runner.pool.num_used
    living: list[Text] = []
    for _ in range(300):
        what = rng.random()
        if what < 0.2 or not living:
            living.append(Text(verifier, rng.choice(prompts)[: rng.randrange(2, 30)], rng.randrange(9)))
        elif what < 0.35:
            verifier.close(living.pop(rng.randrange(len(living))).memory)
        else:
            text = rng.choice(living)
            cached = len(text.memory.cache)
            text.step(TokenTree.chain([3, 4]) if what < 0.5 else EMPTY_TREE)
            assert len(text.memory.cache) >= cached
    for text in living:
        verifier.close(text.memory)
    target_runner.pool.forget()
    assert target_runner.pool.num_used == before


def test_without_free_slots_nothing_is_drafted(own: OwnTrees, target_runner: ModelRunner, prompts: list[list[int]]):
    verifier = LmVerifier(target_runner, own)
    target_runner.pool.forget()
    text = Text(verifier, prompts[0][:15], 40)
    text.step()
    cache = target_runner.new_cache()
    cache.take(target_runner.pool.num_free_blocks * target_runner.pool.block_size)
    text.step()
    assert text.trees[-1] == EMPTY_TREE
    cache.release()
    text.step()
    assert text.trees[-1]
    verifier.close(text.memory)


@pytest.mark.parametrize("right", [(2, 4, 5), (1, 3, 4)])
def test_the_reading_that_agrees_is_taken(
    target_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: tuple[int, ...]
):
    files = read_head(folder(tmp_path, "SpecForge", weights()))

    def agreement(head: RecurrentHead, taps: Taps, *_: Any) -> float:
        return 0.6 if taps.boundaries == right and head.other_reading else 0.1

    monkeypatch.setattr(proof, "_agreement", agreement)
    found = proof.proved(files, target_runner)
    found.taps.remove()
    assert found.taps.boundaries == right
    assert found.head.other_reading


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
    assert (DEMO / "target").is_dir()

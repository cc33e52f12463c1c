"""Heads of random weights beside the demo target, as folders of the field, and texts with self-drafts."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.core.rounds import TargetOpen
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from target_service.heads.checkpoint import read_head
from target_service.heads.layer_head import LayerHead
from target_service.heads.recurrent import RecurrentHead
from target_service.language_model import LmVerifier
from target_service.self_draft.trees import SelfDrafter, SelfDraftTrees
from target_service.verifier import Decision, Job
from tests.cluster import cluster

HIDDEN, HEADS, HEAD_DIM, DRAFT_VOCAB = 320, 5, 64, 600
BOUNDARIES = (2, 4, 5)
NUMBERS = (None, 1, 2, 4, 8, 16, 40)


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
    found |= {"layers.0.self_attn.q_proj.bias": of(heads)}
    return found | {"layers.0.post_attention_layernorm.weight": 1 + 0.1 * of(HIDDEN)}


def of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def medusa_weights(num_heads: int = 3, num_layers: int = 2) -> dict[str, Tensor]:
    """Of Medusa's heads beside the demo target, as its authors name them: an output of each head."""
    found = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            found[f"{head}.{layer}.linear.weight"] = of(10 * head + layer, HIDDEN, HIDDEN)
            found[f"{head}.{layer}.linear.bias"] = of(50 + 10 * head + layer, HIDDEN)
        found[f"{head}.{num_layers}.weight"] = of(99 + head, 4096, HIDDEN)
    return found


def redrafter_weights(exit_dim: int = 128, has_rnn: bool = True) -> dict[str, Tensor]:
    """Of a ReDrafter beside the demo target, as its authors name them, with two blocks."""
    found = {"input_proj.weight": of(1, exit_dim, 2 * HIDDEN), "input_proj.bias": of(2, exit_dim)}
    for block in range(2):
        found[f"lm_head.{block}.linear.weight"] = of(3 + block, exit_dim, exit_dim)
        found[f"lm_head.{block}.linear.bias"] = of(5 + block, exit_dim)
    found["lm_head.2.weight"] = of(7, 4096, exit_dim)
    if has_rnn:
        found |= {
            "rnn_u.weight": of(8, HIDDEN, HIDDEN),
            "rnn_u.bias": of(9, HIDDEN),
            "rnn_w.weight": of(10, HIDDEN, HIDDEN),
        }
    return found if exit_dim != 2 * HIDDEN else {name: found[name] for name in found if "input_proj" not in name}


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


def own_trees(runner: ModelRunner, at: Path, tensors: dict[str, Tensor]) -> SelfDraftTrees:
    files = read_head(folder(at, "SpecForge", tensors))
    head = RecurrentHead(files, runner.model, runner.info.vocab_size, runner.backend)
    return SelfDraftTrees(LayerHead(head, runner.tap(BOUNDARIES), runner, layer=8))


def chain(ids: Sequence[int], cache: SequenceCache) -> Segment:
    """All ids as the rows of a pass."""
    return Segment.chain(ids, 0, cache.block_table, exact=False)


class Text:
    """A sequence that a verifier decodes, with self-drafts of at most ``own`` nodes."""

    def __init__(self, verifier: LmVerifier, prompt: Sequence[int], own: int, temperature: float = 0.0) -> None:
        self.verifier, self.self_draft_nodes, self.ids = verifier, own, list(prompt)
        spec = SequenceSpec(list(prompt), len(prompt), SamplingParams(temperature), 9, Method.COUPLED, b"own")
        self.open, self.state = TargetOpen(spec, max_self_draft_nodes=64), verifier.open(spec)
        self.trees: list[TokenTree] = []

    def step(self, tree: TokenTree = EMPTY_TREE) -> None:
        [decision], _ = self.verifier.verify(
            [Job(self.open, self.state, self.ids, tree, self_draft_nodes=self.self_draft_nodes)]
        )
        if decision is None:
            return
        assert isinstance(decision, Decision)
        tree = decision.self_draft or tree
        self.trees.append(decision.self_draft)
        self.ids += [*(tree.token_ids[node] for node in decision.accepted), decision.next_token]


def remove_taps(own: SelfDrafter) -> None:
    if own.taps is not None:
        own.taps.remove()


def questions(prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Twelve of different lengths; every second one is answered greedily."""
    rng = random.Random(1)
    return [
        {
            "token_ids": {"token_ids": prompt[: rng.randrange(4, 40)]},
            "seed": rng.randrange(99),
            "max_tokens": 20,
            "temperature": float(index % 2),
        }
        for index, prompt in enumerate(prompts[:12])
    ]


_alone: list[list[int]] = []


async def texts_alone(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The answer to each question, asked alone and without drafts. They are always the same, so they are asked once."""
    if not _alone:
        async with cluster([LmVerifier(runner)]) as running:
            answers = [await running.client.generate(**fields, num_draft_tokens=0) for fields in questions(prompts)]
        _alone.extend(answer.token_ids for [answer] in answers)
    return _alone


async def texts_are_the_targets(
    runner: ModelRunner,
    own: SelfDrafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    numbers: Sequence[int | None] = NUMBERS,
    were_asked_before: bool = False,
    **settings: Any,
) -> list[Any]:
    """Ask all questions at once with ``numbers`` of self-draft nodes, while others are cancelled.
    ``settings``: of the cluster. Returns the speculation statistics."""
    rng = random.Random(1)
    asked, alone = questions(prompts), await texts_alone(runner, prompts)
    async with cluster([LmVerifier(runner, own)], **settings) as running:

        async def sample(fields: dict[str, Any], number: int | None) -> Any:
            fixed = {} if number is None else {"num_draft_tokens": number}
            [answer] = await running.client.generate(**fields, **fixed)
            return answer

        async def cancelled(fields: dict[str, Any]) -> None:
            stream = running.client.stream(**fields, num_draft_tokens=5)
            await anext(stream)
            await stream.aclose()

        if were_asked_before:
            await asyncio.gather(*(sample(fields, 0) for fields in asked))
        leaving = [asyncio.create_task(cancelled(fields)) for fields in asked[::2]]
        answers = await asyncio.gather(*(sample(fields, rng.choice(numbers)) for fields in asked))
        await asyncio.gather(*leaving)
    assert [answer.token_ids for answer in answers] == alone
    return [answer.finish.speculation for answer in answers]

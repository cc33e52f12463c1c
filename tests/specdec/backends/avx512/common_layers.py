"""Tiny models with layers of the common kind, and passes over them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from specdec.backends.avx512.decoder_layer import DecoderLayer, compute_decoder_layers
from specdec.core.rounds import ModelInfo
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from tests.models.backends import backend

VOCAB, CONTEXT, NUM_LAYERS = 96, 256, 4
POISON = VOCAB - 1
"""A token that no random text has."""
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=CONTEXT,
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], 0),
    tie_word_embeddings=False,
)
TAKEN: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**SHAPE),
    "mistral, sliding": lambda: hf.MistralConfig(**SHAPE, sliding_window=8),
    "qwen2, biases and sliding layers": lambda: hf.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3, norms of heads": lambda: hf.Qwen3Config(**SHAPE),
    "seed-oss": lambda: hf.SeedOssConfig(**SHAPE),
    "tiles that are not full, biases everywhere": lambda: hf.LlamaConfig(
        **SHAPE | dict(hidden_size=80, intermediate_size=112), attention_bias=True, mlp_bias=True
    ),
}


IN_C = pytest.mark.skipif(compute_decoder_layers() is None, reason="not on this CPU, or not built")
"""For tests of what C computes."""


@contextmanager
def threads_for_passes(num: int) -> Iterator[None]:
    torch.set_num_threads(num)
    yield
    torch.set_num_threads(1)


def model_of(make_config: Callable[[], hf.PreTrainedConfig], dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(make_config(), dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        # Louder than the usual 0.02, and norms and biases that are not 1 and 0, so that each of them matters.
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, float(parameter.detach().mean().round()) if is_norm else 0.0, 0.15)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    return model


def with_call(model: Any) -> tuple[ModelRunner, Any]:
    """A runner, and the call that the backend has made of its model."""
    here = backend()
    calls: list[Any] = []
    here.take = lambda *arguments: calls.append(type(here).take(here, *arguments)) or calls[0]  # type: ignore
    runner = ModelRunner(copy.deepcopy(model), ModelInfo("tiny", "", VOCAB, "", CONTEXT), 4096, here)
    return runner, calls[0]


def runner_of(model: Any) -> ModelRunner:
    return with_call(model)[0]


def num_taken(runner: ModelRunner) -> int:
    return sum(type(layer) is DecoderLayer for layer in runner.model.model.layers)


def random_ids(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(POISON) for _ in range(num)]


def segment_of(cache: SequenceCache, ids: Sequence[int], parents: Sequence[int] | None = None) -> Segment:
    """A chain, if it is not said otherwise."""
    num_context = len(cache)
    cache.take(len(ids))
    parents = range(-1, len(ids) - 1) if parents is None else parents
    return Segment(ids, parents, num_context, list(cache.block_table), range(len(ids)))


def outputs_of(runner: ModelRunner) -> tuple[list[tuple[int, ...]], Tensor]:
    """Two texts in chunks, then row by row, then trees. Returns all that was fed, and its logits."""
    rng = random.Random(3)
    texts: list[list[int]] = [[], []]
    caches = [runner.new_cache() for _ in texts]
    fed: list[tuple[int, ...]] = []
    logits: list[Tensor] = []
    for sizes in ((13, 5), (120, 1), (1, 0), (2, 24), (1, 1)):
        segments = [segment_of(cache, random_ids(rng, size)) for cache, size in zip(caches, sizes, strict=True) if size]
        logits += [outputs.logits for outputs in runner.forward(segments)]
        for text, cache, segment in zip(texts, caches, segments, strict=False):
            fed += [(*text, *segment.token_ids[: row + 1]) for row in range(len(segment.token_ids))]
            text += segment.token_ids
            cache.keep(range(len(segment.token_ids)))
    trees = []
    for text, cache in zip(texts, caches, strict=True):
        parents = [rng.randrange(max(-1, row - 4), row) if row else -1 for row in range(12)]
        trees.append(segment_of(cache, random_ids(rng, 12), parents))
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(trees[-1].token_ids, parents, strict=True):
            paths.append((*(text if parent < 0 else paths[parent]), token))
        fed += paths
    logits += [outputs.logits for outputs in runner.forward(trees)]
    return fed, torch.cat(logits)

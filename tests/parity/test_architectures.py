"""Law: the text of every architecture that is served is the one that transformers gives, whatever is beside it.

Tiny random models with every encoding of positions and every kind of window, far beyond their original contexts and
windows. Texts run beside each other and beside one near the end of the context, with branching drafts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from specdec.core.settings import ModelServiceSettings
from specdec.runner.loading import load_runner
from tests.cluster import cluster
from tests.models.scripted import BranchingDrafter, WatchingVerifier

pytestmark = pytest.mark.slow

VOCAB, CONTEXT, ORIGINAL, WINDOW = 512, 1024, 128, 48
NUM_TOKENS, NUM_TEXTS, LENGTH, NUM_DRAFT_TOKENS = 320, 2, 24, 12
BASE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=None,
    tie_word_embeddings=False,  # with random weights a tied head repeats the last token
)
LAYERS = ["sliding_attention", "full_attention"]


def rope(name: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": name, "rope_theta": 1e4, **fields}}


def longrope(name: str) -> dict[str, Any]:
    """Its texts end where longer ones would be encoded in another way."""
    factors = dict(short_factor=[1.0 + i / 8 for i in range(8)], long_factor=[2.0 + i for i in range(8)])
    original = {"original_max_position_embeddings": CONTEXT}
    return {**original, "max_position_embeddings": 4 * CONTEXT, **rope(name, **factors, **original)}


FAR = dict(factor=8.0, original_max_position_embeddings=ORIGINAL)
MODELS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "llama, llama3": lambda: hf.LlamaConfig(**BASE, **rope("llama3", **FAR, low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama, yarn": lambda: hf.LlamaConfig(**BASE, **rope("yarn", **FAR)),
    "llama, dynamic": lambda: hf.LlamaConfig(**BASE, **rope("dynamic", factor=4.0)),
    "qwen3": lambda: hf.Qwen3Config(**BASE, head_dim=16),
    "mistral, window": lambda: hf.MistralConfig(**BASE, sliding_window=WINDOW),
    "gemma3, windows": lambda: hf.Gemma3TextConfig(**BASE, head_dim=16, sliding_window=WINDOW, layer_types=LAYERS),
    "gemma2, softcapped": lambda: hf.Gemma2Config(**BASE, head_dim=16, sliding_window=WINDOW),
    "phi3, window": lambda: hf.Phi3Config(**BASE, sliding_window=WINDOW),
    "phi3, longrope": lambda: hf.Phi3Config(**BASE | longrope("longrope")),
    "phi3, longrope named su": lambda: hf.Phi3Config(**BASE | longrope("su")),
    "phi3, longrope named yarn": lambda: hf.Phi3Config(**BASE | longrope("yarn")),
}


def saved(config: hf.PreTrainedConfig, directory: Path) -> Any:
    """A model with random weights, loud enough that attention matters, as transformers runs it."""
    torch.manual_seed(1)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return model.eval()


def nearly(model: Any, text: list[int], other: int, near_tie: float) -> bool:
    """Whether the last token of ``text`` and the ``other`` have nearly the same logits."""
    with torch.inference_mode():
        logits = model(torch.tensor([text[:-1]])).logits[0, -1]
    return bool(logits[text[-1]] - logits[other] < near_tie)


@pytest.mark.parametrize("name", MODELS)
async def test_a_long_text_is_that_of_transformers_beside_others(
    name: str, tmp_path: Path, device: str, near_tie: float
) -> None:
    rng = random.Random(name)
    model = saved(MODELS[name](), tmp_path)
    prompts = [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(NUM_TEXTS)]
    outputs = model.generate(torch.tensor(prompts), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0)
    texts = [text[LENGTH:] for text in outputs.tolist()]
    assert all(len(text) == NUM_TOKENS for text in texts)
    assert all(len(set(text)) > 50 for text in texts), "they do not repeat themselves"

    settings = ModelServiceSettings(model=str(tmp_path), dtype="float32", device=device, kv_slots=8192, threads=1)
    runner = load_runner(settings)
    assert runner.info.context_length == CONTEXT
    known = {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}
    long = tuple(rng.randrange(VOCAB) for _ in range(CONTEXT - 100))
    drafter = BranchingDrafter(
        runner.info, lambda spec: known.get(tuple(spec.token_ids[: spec.num_prompt_tokens]), [1])
    )
    watching = WatchingVerifier(runner)
    async with cluster([watching], [drafter]) as deployment:

        async def generate(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
            fields = {"token_ids": {"token_ids": prompt}, "max_tokens": max_tokens, "temperature": 0.0}
            [sample] = await deployment.client.generate(**fields, num_draft_tokens=NUM_DRAFT_TOKENS)
            return list(sample.token_ids)

        *ours, _ = await asyncio.gather(*(generate(prompt, NUM_TOKENS) for prompt in known), generate(long, 100))
    for prompt, text, got in zip(prompts, texts, ours, strict=True):
        at = next((i for i, pair in enumerate(zip(text, got, strict=True)) if pair[0] != pair[1]), None)
        assert at is None or nearly(model, [*prompt, *text[: at + 1]], got[at], near_tie), f"other text at token {at}"
    assert watching.num_branching_trees > 25

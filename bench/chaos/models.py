"""Language models for a lab, and the only right text of each request. Knows no processes and no faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.models.damped_pair import Pair, Shape, damped_pair
from specdec.cli.demo import MODELS
from specdec.core.noise import Domain, Key, exponentials
from specdec.core.sequence import SequenceSpec
from testing.lab import Role
from testing.traffic import Reference

_TINY = Shape(
    vocab_size=1024, hidden=128, layers=4, draft_layers=2, heads=4, kv_heads=2, feed_forward=256, context_length=4096
)
_FLAGS = {
    "torch": (),
    "vllm": ("--vllm.enforce-eager", "--vllm.max-num-seqs=64", "--memory-fraction=0.1"),
}


def tiny_pair(directory: Path) -> Pair:
    """A damped pair with as many tokens as table models have. Writes its checkpoints."""
    return damped_pair(directory, _TINY)


DEMO = Pair(MODELS / "target", MODELS / "draft")
"""The pair in the repository, which has a tokenizer, a chat template and an end token."""


class LanguageModels:
    """A pair in float32 on an engine. The texts are those of transformers with the same noise."""

    def __init__(self, engine: str, pair: Pair) -> None:
        self._pair = pair
        self._flags = (f"--engine={engine}", "--dtype=float32", "--threads=1", *_FLAGS[engine])
        self.reference: Reference = _Transformers(self._pair.target)

    def service(self, role: Role, pass_ms: float) -> tuple[str, ...]:
        model = self._pair.target if role == "target" else self._pair.draft
        return f"{role}_service", f"--model={model}", *self._flags


class _Transformers:
    """Greedy and coupled texts, one token at a time."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def text(self, spec: SequenceSpec, max_tokens: int) -> list[int]:
        import torch

        ids, cache = list(spec.token_ids), None
        with torch.inference_mode():
            for _ in range(max_tokens):
                new = torch.tensor([ids if cache is None else ids[-1:]])
                output = self._model(input_ids=new, past_key_values=cache, logits_to_keep=1)
                cache, scores = output.past_key_values, output.logits[0, -1].double()  # [vocab]
                if not spec.sampling.greedy:
                    noise = exponentials([Key(spec.seed, len(ids))], Domain.COUPLED, len(scores))[0]
                    scores = scores / spec.sampling.temperature - noise.log()
                ids.append(int(scores.argmax()))
        return ids[spec.num_prompt_tokens :]

"""The bundled checkpoints, loaded once on ``--device``, and the reference for their texts: plain transformers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from specdec.core.settings import ModelServiceSettings
from specdec.runner.loading import load_runner
from specdec.runner.model_runner import ModelRunner
from target_service.self_draft.trees import SelfDraftTrees
from tests.checkout import DEMO
from tests.models.poison import poison_static_memory
from tests.one_thread import one_thread  # noqa: F401
from tests.parity.written_heads import own_trees, weights


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """As of ``pytest tests/parity --device cuda``."""
    return str(request.config.getoption("--device"))


class Reference:
    """The demo target as transformers runs it in float32, with its own attention and cache: nothing of ours."""

    def __init__(self, device: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
        self.model: Any = torch.nn.Module.to(model, device).eval()
        self.vocab_size: int = self.model.config.vocab_size
        self.end_token: int = self.model.generation_config.eos_token_id

    @torch.inference_mode()
    def logits_after(self, texts: Sequence[Sequence[int]], cache: DynamicCache | None = None) -> torch.Tensor:
        """The next token's logits after each of these texts, which are equally long: [texts, vocab] float32.

        With a ``cache`` they are what follows the texts that it was called with before.
        """
        ids = torch.tensor(texts, device=self.model.device)
        output = self.model(input_ids=ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1)
        logits: torch.Tensor = output.logits[:, -1].cpu()
        return logits

    @torch.inference_mode()
    def greedy(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, ends: Sequence[int] = (), **fields: Any
    ) -> list[list[int]]:
        """generate(do_sample=False) for prompts that are equally long, up to the end token or one of ``ends``."""
        inputs = torch.tensor(prompts, device=self.model.device)
        ends = [*ends, self.end_token]
        outputs = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=ends,
            pad_token_id=self.end_token,  # what is behind the end of a text that is shorter than another
            **fields,
        )
        return [list(takewhile(lambda token: token not in ends, text[inputs.shape[1] :])) for text in outputs.tolist()]


@pytest.fixture(scope="session")
def reference(device: str) -> Reference:
    return Reference(device)


@functools.cache
def load(role: str, dtype: str, device: str = "cpu", backend: str | None = None) -> ModelRunner:
    """A demo model, once. Each test gives its KV slots back. ``backend``: None: as of ``--backend``."""
    named = {"backend": backend} if backend else {}
    settings = ModelServiceSettings(
        model=str(DEMO / role), dtype=dtype, device=device, kv_slots=32768, threads=1, **named
    )
    return load_runner(settings)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_static_memory(monkeypatch)


@pytest.fixture(scope="session")
def target_runner(device: str) -> ModelRunner:
    return load("target", "float32", device)


@pytest.fixture(scope="session")
def draft_runner(device: str) -> ModelRunner:
    return load("draft", "float32", device)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """The held-out prompts as ids."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    return [tokenizer.encode(prompt["text"]).ids for prompt in json.loads((DEMO / "prompts.json").read_text())]


@pytest.fixture(scope="session")
def near_tie(device: str) -> float:
    """Two logits this close may change places: kernels round differently, a GPU's more than a CPU's."""
    return 1e-4 if torch.device(device).type == "cpu" else 1e-3


@pytest.fixture
def own(target_runner: ModelRunner, tmp_path: Path) -> Iterator[SelfDraftTrees]:
    """A head of random weights beside the demo target."""
    found = own_trees(target_runner, tmp_path, weights())
    yield found
    found.taps.remove()

"""The bundled checkpoints, loaded once, and the reference that they are compared with: plain transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from specdec.core.settings import ModelServiceSettings
from specdec.runner.loading import load_runner
from specdec.runner.model_runner import ModelRunner
from tests.checkout import DEMO


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads wait for each other by spinning: with two on a shared core all this takes ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Reference:
    """The demo target as transformers runs it: its own attention, one plain forward pass, nothing of ours."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits_after(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:  # [texts, vocab] float32
        """The next token's logits after each of these texts, which are equally long; nothing is cached."""
        return self.model(input_ids=torch.tensor(texts), use_cache=False).logits[:, -1]

    @torch.inference_mode()
    def greedy(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, ends: Sequence[int] = (), **fields: Any
    ) -> list[list[int]]:
        """generate(do_sample=False) for prompts that are equally long, up to the end token or one of ``ends``."""
        inputs = torch.tensor(prompts)
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

    @property
    def end_token(self) -> int:
        end: int = self.model.generation_config.eos_token_id
        return end


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def target_runner() -> ModelRunner:
    return load_runner(ModelServiceSettings(model=str(DEMO / "target"), dtype="float32", kv_slots=32768))


@pytest.fixture(scope="session")
def draft_runner() -> ModelRunner:
    return load_runner(ModelServiceSettings(model=str(DEMO / "draft"), dtype="float32", kv_slots=32768))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """The held-out prompts as ids."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    return [tokenizer.encode(prompt["text"]).ids for prompt in json.loads((DEMO / "prompts.json").read_text())]

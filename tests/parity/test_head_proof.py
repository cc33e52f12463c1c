"""A head is proved by its target's own text: the right reading of its folder is found, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.backends.taps import Taps
from specdec.runner.model_runner import ModelRunner
from target_service.heads import proof, target_texts
from target_service.heads.checkpoint import read_head
from target_service.heads.recurrent import RecurrentHead
from tests.checkout import DEMO
from tests.parity.written_heads import (
    folder,
    weights,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("right", [(2, 4, 5), (1, 3, 4)])
def test_the_reading_that_agrees_is_taken(
    target_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: tuple[int, ...]
):
    files = read_head(folder(tmp_path, "SpecForge", weights()))

    heads: list[RecurrentHead] = []

    def hits(_: Any, taps: Taps, *__: Any, **___: Any) -> Tensor:
        return torch.arange(100).repeat(2, 1) < (60 if taps.boundaries == right and heads[0].other_reading else 10)

    def new_head(*parts: Any, **more: Any) -> RecurrentHead:
        heads.append(RecurrentHead(*parts, **more))
        return heads[-1]

    monkeypatch.setattr(proof, "_hits", hits)
    monkeypatch.setattr(proof, "RecurrentHead", new_head)
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
    prompts = target_texts.prompts_of(DEMO / "target", target_runner)
    assert len(set(map(tuple, prompts))) == len(prompts) > 1
    assert len({tuple(each) for each in target_texts.prompts_of(tmp_path, target_runner)}) == 1
    texts = target_texts.write(target_runner, prompts, 3)
    assert texts == target_texts.write(target_runner, prompts, 3)
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

"""Taps give the hidden states of transformers, in each way of computing layers, and copy nothing while closed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from tests.specdec.backends.avx512.common_layers import (
    IN_C,
    NUM_LAYERS,
    TAKEN,
    model_of,
    random_ids,
    segment_of,
    threads_for_passes,
    with_call,
)

EVERY = range(NUM_LAYERS + 1)


@pytest.fixture(params=["by torch", "in one call", "in calls of several layers"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ModelRunner]:
    """A model as transformers has it, and its runner."""
    if request.param != "by torch" and IN_C.args[0]:
        pytest.skip(IN_C.kwargs["reason"])
    if request.param == "in calls of several layers":
        monkeypatch.setattr("specdec.backends.avx512.backend.in_one_call", lambda *_: None)
    model = model_of(TAKEN["llama"], torch.float32 if request.param == "by torch" else torch.bfloat16)
    return model, with_call(model)[0]


def passes(runner: ModelRunner) -> tuple[list[list[int]], list[Segment]]:
    rng = random.Random(2)
    texts = [random_ids(rng, size) for size in (40, 1, 7)]
    return texts, [segment_of(runner.new_cache(), ids) for ids in texts]


@torch.inference_mode()
def plain_states(model: Any, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """By transformers: the rows of all texts at each boundary."""
    states = [model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in texts]
    return [torch.cat([state[boundary][0] for state in states]) for boundary in EVERY]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("boundaries", [(0, 2, 3), (3, 1), (NUM_LAYERS,), (2, NUM_LAYERS, 2)], ids=str)
def test_they_are_the_states_before_layers_and_behind_the_last_norm(
    case: tuple[Any, ModelRunner], boundaries: tuple[int, ...], num_threads: int
) -> None:
    model, runner = case
    taps = runner.tap(boundaries)
    texts, segments = passes(runner)
    with threads_for_passes(num_threads), taps.open():
        runner.forward(segments)
    tapped = taps.take(sum(map(len, texts)))
    every = plain_states(model, texts)
    expected = torch.cat([every[boundary] for boundary in boundaries], -1)
    assert tapped.shape == expected.shape
    rounding = 0.02 if tapped.dtype is torch.bfloat16 else 1e-5
    assert (tapped - expected).abs().mean() < rounding * expected.abs().mean()
    assert (every[1] - every[2]).abs().mean() > 0.5 * every[1].abs().mean(), "other layers have other states"


def test_a_pass_has_the_same_outputs_with_and_without_taps_and_copies_nothing_while_they_are_closed(
    case: tuple[Any, ModelRunner],
) -> None:
    _, runner = case
    [before, *_] = runner.forward(passes(runner)[1])
    taps = runner.tap((1, 2))
    [closed, *_] = runner.forward(passes(runner)[1])
    assert taps.num_copied == 0
    with taps.open():
        [opened, *_] = runner.forward(passes(runner)[1])
    assert taps.num_copied >= 2 * 48
    taps.remove()
    [after, *_] = runner.forward(passes(runner)[1])
    assert all(torch.equal(before.logits, outputs.logits) for outputs in (closed, opened, after))


def test_a_boundary_that_a_model_has_not_is_refused(case: tuple[Any, ModelRunner]) -> None:
    with pytest.raises(ValueError, match="before the target's layers 1, 5 cannot be read"):
        case[1].tap((1, NUM_LAYERS + 1))

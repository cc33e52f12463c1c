"""Laws of everything that drafts beside a target: the text is the target's, and what is right is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.core.tree import ROOT
from specdec.runner.model_runner import ModelRunner
from target_service.heads import proof
from target_service.heads.checkpoint import read_head
from target_service.heads.medusa import Medusa
from target_service.heads.redrafter import ReDrafter
from target_service.language_model import LmVerifier
from target_service.self_draft.by_name import self_drafter
from target_service.self_draft.choices import nodes_of
from target_service.self_draft.trees import Candidates, GrowingDraft, Parent, Passed, SelfDrafter, SelfDraftTrees
from tests.parity.written_heads import (
    HIDDEN,
    Text,
    medusa_weights,
    redrafter_weights,
    remove_taps,
    texts_are_the_targets,
)

pytestmark = pytest.mark.slow

CHOICES = [[0, 0, 0], [0, 1], [1], [2, 0], [9]]


def written(at: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    save_file(tensors, at / "model.safetensors")
    (at / "config.json").write_text(json.dumps(config or {}))
    return at


def medusa(runner: ModelRunner, folder: Path) -> Medusa:
    return Medusa(read_head(folder), runner.model, runner.info.vocab_size, runner.backend, runner.tap((8,)))


def redrafter(runner: ModelRunner, folder: Path) -> ReDrafter:
    return ReDrafter(read_head(folder), runner.model, runner.info.vocab_size, runner.backend, runner.tap((8,)))


@pytest.fixture(
    params=[
        *("Medusa", "Medusa's choices", "Medusa of NaN", "ReDrafter", "ReDrafter of NaN"),
        *("lookup", "recycling", "lookahead"),
    ]
)
def drafting(request: pytest.FixtureRequest, target_runner: ModelRunner, tmp_path: Path) -> Iterator[SelfDrafter]:
    name, tensors = request.param, medusa_weights()
    if name == "Medusa of NaN":
        tensors["1.0.linear.weight"][3, 3] = float("nan")
    found: SelfDrafter
    if name.startswith("Medusa"):
        head = medusa(target_runner, written(tmp_path, tensors))
        found = SelfDraftTrees(head, CHOICES if name == "Medusa's choices" else ())
    elif name.startswith("ReDrafter"):
        tensors = redrafter_weights()
        if name == "ReDrafter of NaN":
            tensors["rnn_u.weight"][3, 3] = float("nan")
        found = SelfDraftTrees(redrafter(target_runner, written(tmp_path, tensors)))
    else:
        found = self_drafter(name if name != "lookahead" else "lookahead:3,4,2", target_runner.info.vocab_size)
    yield found
    remove_taps(found)


async def test_the_text_is_the_targets_whatever_drafts_beside_it(
    drafting: SelfDrafter, target_runner: ModelRunner, prompts: list[list[int]], request: pytest.FixtureRequest
):
    told = await texts_are_the_targets(target_runner, drafting, prompts)
    num_drafted = sum(each.num_self_draft_tokens for each in told)
    if request.node.callspec.params["drafting"] == "ReDrafter of NaN":
        assert num_drafted == 0  # it reads its own state from the first step on
    else:
        assert num_drafted > 20


class Oracle:
    """A head that knows the text: its first guess is right."""

    kind, taps = "oracle", None

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def open(self, salt: bytes) -> None: ...

    def num_rows(self, state: None) -> None: ...

    def learn(self, state: None, passed: Passed) -> None: ...

    def begin(self, drafts: Sequence[GrowingDraft]) -> Sequence[GrowingDraft]:
        return drafts

    def candidates(self, parents: Sequence[Parent]) -> list[Candidates]:
        return [Candidates((self._text[parent.draw.position], 5), 1) for parent in parents]

    def end(self, drafts: Sequence[GrowingDraft]) -> None: ...


@pytest.mark.parametrize(("choices", "temperature"), [((), 0.0), ((), 1.0), ([[0, 0, 0, 0], [1]], 1.0)])
def test_a_truthful_head_is_accepted_to_its_depth(
    target_runner: ModelRunner, prompts: list[list[int]], temperature: float, choices: list[list[int]]
):
    plain = Text(LmVerifier(target_runner), prompts[0][:12], 0, temperature)
    while len(plain.ids) < 60:
        plain.step()
    plain.verifier.close(plain.state)
    own = SelfDraftTrees(Oracle(plain.ids), choices)
    text = Text(LmVerifier(target_runner, own), prompts[0][:12], 5, temperature)
    text.step()
    while len(text.ids) < 40:
        before = len(text.ids)
        text.step()
        tree = text.trees[-1]
        assert len(text.ids) - before == 2 + max(tree.depths)  # all of the chain, and the token after it
        assert not choices or max(tree.depths) == 3
    assert text.ids == plain.ids[: len(text.ids)]
    text.verifier.close(text.state)


def by_numpy(states: np.ndarray, weight: Tensor, bias: Tensor) -> np.ndarray:
    """A residual block."""
    inner = states @ weight.numpy().T + bias.numpy()
    return states + inner / (1 + np.exp(-inner))


@torch.inference_mode()
def test_medusas_forward_pass_is_the_published_one(target_runner: ModelRunner, tmp_path: Path, device: str):
    if device != "cpu":
        pytest.skip("the formulas are computed on the CPU")
    raw, states = medusa_weights(), torch.randn(5, HIDDEN)
    head = medusa(target_runner, written(tmp_path, raw))
    assert len(head.blocks) == 3
    for number in range(3):
        expected = states.numpy()
        for layer in range(2):
            prefix = f"{number}.{layer}.linear"
            expected = by_numpy(expected, raw[f"{prefix}.weight"], raw[f"{prefix}.bias"])
        expected = expected @ raw[f"{number}.2.weight"].numpy().T
        assert np.allclose(head.logits(states, number).numpy(), expected, atol=1e-4)
    head.taps.remove()


@torch.inference_mode()
@pytest.mark.parametrize("has_rnn", [True, False])
@pytest.mark.parametrize("exit_dim", [128, 2 * HIDDEN])
def test_redrafters_forward_pass_is_the_published_one(
    target_runner: ModelRunner, tmp_path: Path, device: str, has_rnn: bool, exit_dim: int
):
    if device != "cpu":
        pytest.skip("the formulas are computed on the CPU")
    raw, states, tokens = redrafter_weights(exit_dim, has_rnn), torch.randn(4, HIDDEN), [5, 900, 7, 7]
    head = redrafter(target_runner, written(tmp_path, raw))
    own, embedding = np.zeros((4, HIDDEN)), target_runner.model.get_input_embeddings().weight.numpy()
    found = torch.zeros(4, HIDDEN)
    for _ in range(3):  # three steps with the same tokens
        inner = embedding[tokens] + own
        if has_rnn:
            inner = embedding[tokens] @ raw["rnn_w.weight"].numpy().T + own @ raw["rnn_u.weight"].numpy().T
            inner = inner + raw["rnn_u.bias"].numpy()
        own = inner / (1 + np.exp(-inner)) if has_rnn else inner
        found = head.next_states(found, tokens)
        rows = np.concatenate([states.numpy(), own], -1)
        if exit_dim != 2 * HIDDEN:
            rows = rows @ raw["input_proj.weight"].numpy().T + raw["input_proj.bias"].numpy()
        for block in range(2):
            rows = by_numpy(rows, raw[f"lm_head.{block}.linear.weight"], raw[f"lm_head.{block}.linear.bias"])
        expected = rows @ raw["lm_head.2.weight"].numpy().T
        assert np.allclose(head.logits(states, found).numpy(), expected, atol=1e-3)
    head.taps.remove()


@pytest.mark.parametrize("source", ["its authors", "TGI, version 1", "TGI, version 2", "a whole model", "vLLM"])
def test_a_folder_of_each_source_of_medusa_gives_the_same_heads(source: str, tmp_path: Path):
    raw = medusa_weights(num_layers=1)
    layers = {name: tensor for name, tensor in raw.items() if "linear" in name}
    written_as, file = raw, "medusa_lm_head.safetensors"
    if source == "TGI, version 2":
        written_as = layers
    elif source == "a whole model":
        file = "model.safetensors"
        written_as = {f"medusa_head.{name}": tensor for name, tensor in raw.items()}
        written_as |= {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3), "lm_head.weight": torch.zeros(3, 3)}
    elif source == "vLLM":
        file, ids = "model.safetensors", torch.arange(4096).flip(0)
        written_as = {"token_map": ids}
        for head in range(3):
            for part in ("weight", "bias"):
                written_as[f"medusa_heads.blocks.{head}.layers.0.{part}"] = raw[f"{head}.0.linear.{part}"]
            written_as[f"medusa_heads.lm_heads.{head}.weight"] = raw[f"{head}.1.weight"]
    if source == "its authors":
        torch.save(raw, tmp_path / "medusa_lm_head.pt")
    else:
        save_file(written_as, tmp_path / file)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')  # which is wrong in the field as well
    files = read_head(tmp_path)
    expected = {name.replace(".linear", ""): tensor for name, tensor in layers.items()}
    if source != "TGI, version 2":
        expected |= {f"{head}.output.weight": raw[f"{head}.1.weight"] for head in range(3)}
    assert files.kind == "medusa"
    assert files.weights.keys() == expected.keys()
    assert all(torch.equal(files.weights[name], tensor) for name, tensor in expected.items())
    assert (files.ids is not None) == (source == "vLLM")


def test_choices_are_all_nodes_or_the_longest_paths_alone(target_runner: ModelRunner, tmp_path: Path):
    every = [[0], [0, 0], [0, 0, 0], [0, 1], [1], [2], [2, 0], [9]]
    assert nodes_of(every) == nodes_of(CHOICES)
    files = read_head(written(tmp_path, medusa_weights(), {"medusa_choices": CHOICES}))
    assert list(files.choices) == nodes_of(every)
    for bad in ([[0, -1]], [[]], [["0"]], [[64]], [1], "12", 5):
        (tmp_path / "config.json").write_text(json.dumps({"medusa_choices": bad}))
        with pytest.raises(ValueError, match="a static tree is a list of paths"):
            read_head(tmp_path)


def test_a_static_tree_has_the_guesses_of_its_ranks(
    target_runner: ModelRunner, tmp_path: Path, prompts: list[list[int]]
):
    files = read_head(written(tmp_path, medusa_weights(), {"medusa_choices": CHOICES}))
    head = Medusa(files, target_runner.model, 4096, target_runner.backend, target_runner.tap((8,)))
    text = Text(LmVerifier(target_runner, SelfDraftTrees(head, files.choices)), prompts[0][:12], 40)
    text.step()
    state = text.state.self_draft.head_state.state
    text.step()
    tree = text.trees[-1]
    best = [head.logits(state[None], depth)[0].double().topk(10).indices.tolist() for depth in range(3)]
    paths: dict[int, list[int]] = {ROOT: []}
    for node, parent in enumerate(tree.parents):
        paths[node] = [*paths[parent], best[tree.depths[node]].index(tree.token_ids[node])]
    assert [tuple(paths[node]) for node in range(len(tree))] == nodes_of(CHOICES)
    text.verifier.close(text.state)
    head.taps.remove()


@pytest.mark.parametrize("kind", ["Medusa", "ReDrafter"])
def test_a_head_of_the_last_state_of_another_model_is_refused(target_runner: ModelRunner, tmp_path: Path, kind: str):
    tensors = medusa_weights() if kind == "Medusa" else redrafter_weights()
    with pytest.raises(ValueError, match="is of another model: it agrees with"):
        proof.proved(read_head(written(tmp_path, tensors)), target_runner)
    if kind == "Medusa":
        tensors["0.0.linear.weight"] = torch.zeros(HIDDEN + 1, HIDDEN)
    else:
        tensors["rnn_u.weight"] = torch.zeros(HIDDEN + 1, HIDDEN)
    with pytest.raises(ValueError, match="has the shape"):
        proof.proved(read_head(written(tmp_path, tensors)), target_runner)


def test_what_is_recycled_stays_with_its_salt(target_runner: ModelRunner, prompts: list[list[int]]):
    """Else times would tell the texts of others."""
    own = self_drafter("recycling", target_runner.info.vocab_size)
    verifier = LmVerifier(target_runner, own)
    first = Text(verifier, prompts[0][:12], 4)
    for _ in range(12):
        first.step()
    assert own.open(b"own").head_state.known.any()
    assert not own.open(b"another").head_state.known.any()
    verifier.close(first.state)


def test_a_method_that_is_not_possible_is_refused():
    for name in ("lookahead:1,3,4", "lookahead:4,2,4", "lookahead:4,3,0", "lookahead:15,5,15", "lookahead:1,2", "else"):
        with pytest.raises(ValueError, match="lookahead"):
            self_drafter(name, 100)


def test_rows_of_padding_that_repeat_a_token_are_left_out(target_runner: ModelRunner, tmp_path: Path):
    """Else a tree could have the same token twice below a node."""
    weights = medusa_weights()
    weights = {name: tensor[:6] if name.endswith(".2.weight") else tensor for name, tensor in weights.items()}
    weights["token_map"] = torch.tensor([7, 9, 100, 7, 0, 0])
    head = medusa(target_runner, written(tmp_path, weights))
    assert head.ids.tolist() == [7, 9, 100, 0]
    assert head.logits(torch.zeros(2, HIDDEN), 0).shape == (2, 4)
    head.taps.remove()


def test_a_head_without_biases_is_read(target_runner: ModelRunner, tmp_path: Path):
    tensors = {name: tensor for name, tensor in redrafter_weights().items() if not name.endswith("bias")}
    head = redrafter(target_runner, written(tmp_path, tensors))
    assert head.after(torch.zeros(2, HIDDEN), [5, 6]).shape == (2, 4096)
    head.taps.remove()

"""Laws of heads: whatever a head says, the text is the target's; and what it says depends on the text alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from specdec.core.rounds import TargetOpen
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.runner.model_runner import ModelRunner
from specdec.speculation.acceptance import AcceptanceModel
from target_service.language_model import LmVerifier
from target_service.self_draft.trees import SelfDraftTrees
from target_service.verifier import Decision, Job
from tests.parity.written_heads import Text, own_trees, remove_taps, texts_are_the_targets, weights

pytestmark = pytest.mark.slow


def next_tree(verifier: LmVerifier, ids: Sequence[int]) -> TokenTree:
    """The self-draft after a text that is fed at once: its last id comes from a pass."""
    text = Text(verifier, ids[:-1], 0)
    text.step()
    text.ids[-1] = ids[-1]  # as if that had been drawn
    text.self_draft_nodes = 6
    text.step()
    verifier.close(text.state)
    return text.trees[-1]


def test_what_a_head_drafts_depends_on_the_text_alone(
    own: SelfDraftTrees, target_runner: ModelRunner, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Fed at once, token by token, along accepted trees of others, after a replay, and after a shared prefix. Where a
    tree grows also depends on what was accepted before, which is not told here."""
    monkeypatch.setattr(AcceptanceModel, "observe", lambda *_, **__: None)
    verifier = LmVerifier(target_runner, own)
    for prompt in prompts[:3]:
        target_runner.pool.forget()
        text = Text(verifier, prompt[:20], 6)
        while len(text.ids) < 32:
            ahead = Text(verifier, text.ids, 0)
            ahead.step()
            verifier.close(ahead.state)
            text.step()  # a self-draft, mostly rejected
            text.self_draft_nodes = 0
            text.step(TokenTree.chain([_peek(verifier, text.ids), 5]))  # a tree of which one node is accepted
            text.self_draft_nodes = 6
        base = list(text.ids)
        text.step()
        found = text.trees[-1]
        verifier.close(text.state)
        assert len(found) == 6
        target_runner.pool.forget()
        again = next_tree(verifier, base)
        assert again == found  # fed at once
        assert next_tree(verifier, base) == found  # most of it found in the cache


def _peek(verifier: LmVerifier, ids: Sequence[int]) -> int:
    text = Text(verifier, ids, 0)
    text.step()
    verifier.close(text.state)
    return text.ids[-1]


@pytest.mark.parametrize("spoilt", ["random", "NaN", "infinite output"])
async def test_the_text_is_the_targets_whatever_the_head_says(
    target_runner: ModelRunner, prompts: list[list[int]], tmp_path: Path, spoilt: str
):
    tensors = weights(1)
    if spoilt == "NaN":
        tensors["midlayer.mlp.down_proj.weight"][3, 3] = float("nan")
    if spoilt == "infinite output":
        tensors["lm_head.weight"][7] = float("inf")
    head = own_trees(target_runner, tmp_path, tensors)
    try:
        await texts_are_the_targets(target_runner, head, prompts)
    finally:
        remove_taps(head)


def test_nothing_is_copied_while_no_head_is_asked(
    own: SelfDraftTrees, target_runner: ModelRunner, prompts: list[list[int]]
):
    verifier = LmVerifier(target_runner, own)
    spec = SequenceSpec(prompts[0][:12], 12, SamplingParams(0.0), 1, Method.COUPLED)
    state, ids = verifier.open(spec), list(prompts[0][:12])
    for _ in range(3):
        [decision], timings = verifier.verify([Job(TargetOpen(spec), state, ids)])
        assert isinstance(decision, Decision)
        ids.append(decision.next_token)
        assert timings.self_draft_us == 0
    verifier.close(state)
    assert own.taps.num_copied == 0


def test_slots_come_back_and_growths_take_none_from_texts(
    own: SelfDraftTrees, target_runner: ModelRunner, prompts: list[list[int]]
):
    verifier, rng = LmVerifier(target_runner, own), random.Random(4)
    target_runner.pool.forget()
    before = target_runner.pool.num_used
    living: list[Text] = []
    for _ in range(500):
        what = rng.random()
        if what < 0.2 or not living:
            living.append(Text(verifier, rng.choice(prompts)[: rng.randrange(2, 30)], rng.randrange(9)))
        elif what < 0.35:
            verifier.close(living.pop(rng.randrange(len(living))).state)
        else:
            text = rng.choice(living)
            cached = len(text.state.cache)
            text.step(TokenTree.chain([3, 4]) if what < 0.5 else EMPTY_TREE)
            assert len(text.state.cache) >= cached
    for text in living:
        verifier.close(text.state)
    target_runner.pool.forget()
    assert target_runner.pool.num_used == before


def test_without_free_slots_nothing_is_drafted(
    own: SelfDraftTrees, target_runner: ModelRunner, prompts: list[list[int]]
):
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
    verifier.close(text.state)

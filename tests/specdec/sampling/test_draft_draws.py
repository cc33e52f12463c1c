"""Law: a token that was drawn as it says is believed, and no other token is."""

from __future__ import annotations

import math
import random

import pytest
import torch

from draft_service.drafter import DraftSequence
from draft_service.drafters.proposal import draw
from specdec.core.noise import Key
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.sampling import draft_draws
from specdec.sampling.draft_draws import drawn_as_said
from specdec.sampling.state import SamplingState
from specdec.transport.wire import read_tree, write_tree
from specdec.v1 import common_pb2
from tests.models.lying import noise_of, winner

VOCAB = 500


class Memory:
    def __init__(self, spec: SequenceSpec) -> None:
        self.sampling = SamplingState(spec)


def drafted(seed: int, num_sequences: int, num_nodes: int) -> list[DraftSequence]:
    """Sequences with chains that a draft has drawn, all sequences of a step at once."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(num_sequences):
        ids = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 2000)))
        sampling = SamplingParams(rng.choice([0.3, 1.0, 2.0]), top_k=rng.choice([0, 2, 50]), top_p=rng.choice([1, 0.9]))
        spec = SequenceSpec(ids, 1, sampling, rng.getrandbits(64), rng.choice([Method.TOKEN, Method.BLOCK]))
        sequences.append(DraftSequence(spec, list(ids), state=Memory(spec)))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_nodes):
        dtype = rng.choice([torch.float32, torch.bfloat16])
        logits = [
            (rng.choice([0.0, 1.0, 5.0]) * torch.randn(1, VOCAB, generator=generator)).to(dtype) for _ in sequences
        ]
        for sequence, drawn in zip(sequences, draw(sequences, logits, rng.choice([VOCAB, 1 << 20])), strict=True):
            sequence.tree = sequence.tree.extended(drawn.below(len(sequence.tree) - 1, 1))
    return sequences


def root(sequence: DraftSequence) -> Key:
    return Key(sequence.spec.seed, sequence.base, sequence.base)


def sent(tree: TokenTree) -> TokenTree:
    """What arrives of it."""
    return read_tree(common_pb2.TokenTree.FromString(write_tree(tree).SerializeToString()), VOCAB)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_draft_draws_is_believed(seed: int) -> None:
    sequences = drafted(seed, num_sequences=24, num_nodes=6)
    trees, keys = [sent(sequence.tree) for sequence in sequences], [root(sequence) for sequence in sequences]
    assert drawn_as_said(trees, keys) == [True] * 24
    for tree, key in zip(trees, keys, strict=True):
        assert drawn_as_said([tree], [key]) == [True]
        for node, (token, probs) in enumerate(zip(tree.token_ids, tree.draft_probs, strict=True)):
            assert probs is not None
            assert token == winner(probs, noise_of(key._replace(position=key.position + node), VOCAB))


def test_no_other_token_is_believed() -> None:
    for sequence in drafted(9, num_sequences=12, num_nodes=3):
        tree, key = sequence.tree, root(sequence)
        for node, probs in enumerate(tree.draft_probs):
            assert probs is not None
            for other in set(probs.token_ids) - {tree.token_ids[node]}:
                tokens = [*tree.token_ids[:node], other, *tree.token_ids[node + 1 :]]
                assert drawn_as_said([TokenTree.chain(tokens, tree.draft_probs)], [key]) == [False]


def test_a_lie_is_found_in_the_chain_that_has_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = drafted(10, num_sequences=16, num_nodes=5)
    trees, keys = [sequence.tree for sequence in sequences], [root(sequence) for sequence in sequences]
    lie = SparseDistribution((7, 8), (2.0**-24, 1.0))
    trees[3] = TokenTree.chain([*trees[3].token_ids[:4], 7], [*trees[3].draft_probs[:4], lie])
    trees[5] = TokenTree.chain([1, 2, 3])  # certain: nothing was drawn
    trees[6] = TokenTree()
    keys[9] = keys[9]._replace(base=keys[9].base + 1)  # drawn at another base
    expected = [index not in (3, 9) for index in range(16)]
    for at_once in (1, 200, 1 << 16):
        monkeypatch.setattr(draft_draws, "_NUMBERS_AT_ONCE", at_once)
        assert drawn_as_said(trees, keys) == expected


@pytest.mark.parametrize(("behind", "believed"), [(0.0, True), (2.0**-44, True), (2.0**-36, False)])
def test_a_race_that_another_machine_may_see_the_other_way_round_is_believed(
    monkeypatch: pytest.MonkeyPatch, behind: float, believed: bool
) -> None:
    """The last bits of a logarithm depend on the machine."""
    for log_size in (-22.0, 0.0, 3.0):
        noise = torch.tensor([log_size, log_size + behind], dtype=torch.float64).exp()
        monkeypatch.setattr(draft_draws, "exponentials_at", lambda *_, noise=noise: noise.clone())
        tree = TokenTree.chain([2], [SparseDistribution((1, 2), (1.0, 1.0))])
        assert drawn_as_said([tree], [Key(1, 2, 2)]) == [believed]
        assert math.log(noise[1]) - math.log(noise[0]) == pytest.approx(behind, abs=2.0**-46)

"""Laws of the transforms: the definitions, transformers' processors, and states that are the text's alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation import SequenceBiasLogitsProcessor

from specdec.core.errors import InvalidArgument
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.sampling import logits_processors as transforms
from specdec.sampling.distributions import probabilities
from specdec.sampling.logits_processors import Transforms, transformed
from tests.models.automaton import Automaton
from tests.specdec.speculation.exact_law import BOTH, Pair, error

VOCAB = 7


def by_the_book(logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams):
    """The definitions, token by token."""
    scores = []
    for token, logit in enumerate(logits):
        logit += dict(params.logit_bias).get(token, 0.0)
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        if len(output) < params.min_tokens and token in params.end_token_ids:
            logit = -math.inf
        scores.append(logit)
    return scores


@st.composite
def trees(draw, vocab_size=VOCAB, max_nodes=8):
    parents, tokens = [], []
    for node in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(-1, node - 1))
        taken = [token for token, other in zip(tokens, parents, strict=True) if other == parent]
        if free := sorted(set(range(vocab_size)).difference(taken)):
            parents.append(parent)
            tokens.append(draw(st.sampled_from(free)))
    return TokenTree(tuple(tokens), tuple(parents))


def path(tree: TokenTree, node: int) -> list[int]:
    return list(tree.path_ids(node))


ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)
params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -1.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9, width=32), max_size=3).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    min_tokens=st.integers(0, 14),
    end_token_ids=st.sampled_from([(), (0,), (2, 5)]),
)


@settings(max_examples=150, deadline=None)
@given(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), output=ids, tree=trees(), params=params)
def test_each_node_has_the_transforms_of_its_text(prompt, output, tree, params):
    logits = 3 * torch.randn(1 + len(tree), VOCAB, generator=torch.Generator().manual_seed(len(output)))
    before = logits.clone()
    transforms = Transforms(SequenceSpec((*prompt, *output), len(prompt), params))
    rows = transformed([logits], [(transforms, tree)])
    expected = [
        by_the_book(row, prompt, [*output, *path(tree, node)], params)
        for node, row in enumerate(logits.double().tolist(), start=-1)
    ]
    np.testing.assert_allclose(rows.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)
    # A draft asks for the last node alone.
    assert torch.equal(transformed([logits[-1:]], [(transforms, tree)]), rows[-1:])


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    steps=st.lists(st.tuples(trees(max_nodes=4), ids), max_size=6),
    params=params,
)
def test_a_text_taken_in_piece_by_piece_is_that_of_a_replay(prompt, steps, params):
    text = list(prompt)
    live = Transforms(SequenceSpec(tuple(text), len(prompt), params))
    for tree, committed in steps:
        logits = torch.randn(1 + len(tree), VOCAB, generator=torch.Generator().manual_seed(len(text)))
        rows = transformed([logits], [(live, tree)])
        replayed = Transforms(SequenceSpec(tuple(text), len(prompt), params))
        assert torch.equal(rows, transformed([logits], [(replayed, tree)]))
        text += committed
        live.take_in(text)


def test_the_work_of_a_round_does_not_grow_with_the_text():
    """Ids that were taken in are not read again."""
    text, read = list(range(1000)), []
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5)
    transforms = Transforms(SequenceSpec(tuple(text), 500, params))

    class Ids(list):
        def __getitem__(self, index):
            read.extend(super().__getitem__(index))
            return super().__getitem__(index)

    transforms.take_in(Ids([*text, 3, 4]))
    assert read == [3, 4]


def test_what_is_sent_to_the_device_does_not_grow_with_rows_times_tokens(monkeypatch):
    """64 sequences of 32k tokens with 8 draft tokens each took 300 MB in every pass."""
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1)
    num_tokens, num_nodes, num_sequences = 500, 20, 3
    spec = SequenceSpec(tuple(range(num_tokens)), num_tokens, params)
    tree = TokenTree.chain(range(300, 300 + num_nodes))
    logits = [torch.randn(1 + num_nodes, 1000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    places = [(Transforms(spec), tree) for _ in range(num_sequences)]
    alone = transformed(logits[:1], places[:1])
    num_numbers, joined = 0, transforms._joined

    def recorded(*arguments):
        nonlocal num_numbers
        tensors = joined(*arguments)
        num_numbers += sum(tensor.numel() for tensor in tensors)
        return tensors

    monkeypatch.setattr(transforms, "_joined", recorded)
    rows = transformed(logits, places)
    assert num_numbers < num_sequences * (2 * num_tokens + 6 * num_nodes * (num_nodes + 1) / 2 + 10)
    assert torch.equal(rows[: 1 + num_nodes], alone)


def test_penalties_of_many_tokens_are_written_a_few_rows_at_a_time(monkeypatch):
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5)
    tree = TokenTree.chain([3, 4, 3, 60, 60])
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(1))
    place = Transforms(SequenceSpec(tuple(range(50)), 20, params)), tree
    whole = transformed([logits], [place])
    for numbers in (1, 60, 120):
        monkeypatch.setattr(transforms, "_ENTRIES_AT_ONCE", numbers)
        assert torch.equal(transformed([logits], [place]), whole)


def test_penalties_are_those_of_transformers():
    generator = torch.Generator().manual_seed(3)
    prompt, output = [4, 9, 9, 30], [2, 2, 7]
    logits = 4 * torch.randn(1, 40, generator=generator)
    given_ids = torch.tensor([[*prompt, *output]])
    bias = ((2, -1.5), (9, 3.0), (33, 2.0))
    params = SamplingParams(repetition_penalty=1.4, logit_bias=bias, min_tokens=4, end_token_ids=(7, 12))
    theirs = logits
    for processor in (
        SequenceBiasLogitsProcessor([[[token], value] for token, value in bias]),
        RepetitionPenaltyLogitsProcessor(1.4),
        MinNewTokensLengthLogitsProcessor(len(prompt), 4, [7, 12], device="cpu"),
    ):
        theirs = processor(given_ids, theirs)
    ours = transformed([logits], [(Transforms(SequenceSpec((*prompt, *output), len(prompt), params)), EMPTY_TREE)])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert ours[0, [7, 12]].tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_transforms_stay_as_they_are_beside_rows_with_some(dtype):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4)).to(dtype)
    plain = Transforms(SequenceSpec((1, 2), 1))
    biased = Transforms(SequenceSpec((1, 2), 1, SamplingParams(logit_bias=((3, 5.0),))))
    rows = transformed([logits[:1], logits[1:2], logits[2:]], [(t, EMPTY_TREE) for t in (plain, biased, plain)])
    assert torch.equal(rows[[0, 2]], logits[[0, 2]].float())
    assert rows[1, 3] == logits[1, 3].float() + 5
    assert transformed([logits], [(plain, TokenTree.chain([1, 2]))]) is logits


class TransformedPair(Pair):
    """Two tables of logits whose rows the services would transform. ``target`` and ``draft`` are the definitions'."""

    def __init__(self, params: SamplingParams, per_node: bool = True) -> None:
        super().__init__(3, 2, {}, {})
        self._params = params
        self._per_node = per_node
        generator = torch.Generator().manual_seed(2)
        self._logits = {}
        for model in (self.target, self.draft):
            for length in range(self.num_draft_tokens + 1):
                for prefix in self.paths(length):
                    row = 1.5 * torch.randn(self.vocab_size, generator=generator)
                    self._logits[id(model), prefix] = row
                    scores = by_the_book(row.tolist(), PROMPT, [*OUTPUT, *prefix], params)
                    model[prefix] = torch.tensor([scores], dtype=torch.float64).softmax(-1)[0].numpy()

    def rows(self, model, path, num_rows):
        """As decision and proposal have them: a chain, of which each row is a node."""
        if not num_rows:
            return super().rows(model, path, 0)
        transforms = Transforms(SequenceSpec((*PROMPT, *OUTPUT), len(PROMPT), self._params))
        logits = torch.stack([self._logits[id(model), path[:i]] for i in range(num_rows)])
        tree = TokenTree.chain(path[: num_rows - 1])
        if not self._per_node:
            return probabilities(
                torch.cat([transformed([row[None]], [(transforms, EMPTY_TREE)]) for row in logits]),
                [self._params] * num_rows,
            )
        return probabilities(transformed([logits], [(transforms, tree)]), [self._params] * num_rows)


PROMPT, OUTPUT = [2, 2], [1]


@BOTH
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.8),
        SamplingParams(presence_penalty=1.2, frequency_penalty=-0.6, logit_bias=((0, 0.7),)),
        SamplingParams(frequency_penalty=0.9, min_tokens=3, end_token_ids=(2,)),
    ],
)
def test_token_and_block_verification_follow_the_transformed_law(verify, params):
    """By enumeration of drafts and accept uniforms, as in test_verification."""
    assert error(verify, TransformedPair(params)) < 1e-6  # float32 rows against float64 definitions
    assert error(verify, TransformedPair(params, per_node=False)) > 1e-3


# Alternating 0 and 1, and after two of them 6 ends it; 5 may come at any time and changes nothing.
GRAMMAR = [{0: 1, 1: 2, 5: 0}, {1: 3, 5: 1}, {0: 3, 5: 2}, {6: 4, 5: 3}, {}]


@settings(max_examples=100, deadline=None)
@given(output=st.lists(st.integers(0, 6), max_size=6).filter(Automaton(GRAMMAR).accepts), tree=trees())
def test_a_grammar_holds_at_every_node_that_it_allows(output, tree):
    logits = torch.randn(1 + len(tree), VOCAB, generator=torch.Generator().manual_seed(5))
    automaton = Automaton(GRAMMAR)
    transforms = Transforms(SequenceSpec((6, 6, *output), 2), automaton)
    before = automaton.state
    rows = transformed([logits], [(transforms, tree)])
    assert automaton.state == before
    for node in range(-1, len(tree)):
        text = [*output, *path(tree, node)]
        if Automaton(GRAMMAR).accepts(text):
            allowed = [token for token in range(VOCAB) if Automaton(GRAMMAR).accepts([*text, token])]
            expected = torch.full((VOCAB,), -math.inf)
            expected[allowed] = logits[node + 1, allowed]
            assert torch.equal(rows[node + 1], expected)
        else:
            assert not rows[node + 1].isfinite().any()
    assert torch.equal(transformed([logits[-1:]], [(transforms, tree)]), rows[-1:])


def test_an_output_that_breaks_its_grammar_is_refused():
    with pytest.raises(InvalidArgument, match="grammar"):
        Transforms(SequenceSpec((6, 0, 0), 1), Automaton(GRAMMAR))

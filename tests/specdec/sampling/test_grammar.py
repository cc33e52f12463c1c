"""A grammar means the same with and without speculation, and costs other sequences a bounded time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from specdec.core.errors import InvalidArgument
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.sampling.grammar import Budget, Grammars
from specdec.sampling.logits_processors import transformed
from specdec.sampling.state import SamplingState
from tests.models.grammars import AMBIGUOUS, AMBIGUOUS_AFTER_A, GRAMMARS, TOKENIZER, VOCAB, random_tree

END = 0
TOKENS = Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(str(TOKENIZER), VOCAB, [END])


def state_of(grammars: Grammars, grammar: str, output: Sequence[int] = ()) -> SamplingState:
    spec = SequenceSpec((5, *output), 1, SamplingParams(grammar=grammar))
    return SamplingState(spec, grammars.compiled(grammar).mask())


def allowed(state: SamplingState, tree: TokenTree) -> list[list[int]]:
    """The tokens that are allowed at the root and at each node."""
    rows = transformed([torch.zeros(1 + len(tree), VOCAB)], [(state.transforms, tree)])
    return [row.isfinite().nonzero().flatten().tolist() for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAMMARS)
def test_each_branch_is_masked_as_by_a_matcher_of_its_text_alone(grammars: Grammars, name: str) -> None:
    compiled, rng = grammars.compiled(GRAMMARS[name]), random.Random(name)
    num_trees = 0
    while num_trees < 60:
        spec = SequenceSpec((5,), 1, SamplingParams(grammar=GRAMMARS[name]))
        state, output = SamplingState(spec, compiled.mask()), []
        for _ in range(12):
            tree = random_tree(rng, compiled.mask(), output)
            num_trees += 1
            fresh = []
            for node in range(-1, len(tree)):
                path = list(tree.path_ids(node)) if node >= 0 else []
                of_text = SamplingState(spec, compiled.mask())
                assert of_text.take_in([5, *output, *path]) is None
                fresh.append(allowed(of_text, EMPTY_TREE)[0])
            assert allowed(state, tree) == fresh
            possible = [token for token in fresh[0] if token != END]
            if not possible:
                break
            output.append(rng.choice(possible))
            assert state.take_in([5, *output]) is None


REJECTED = [
    ("", ["{", '"', "a"], [-1, 0, 1]),
    ("{", ['"'], [-1]),
    ("{\n", ['"', "\n"], [-1, -1]),
    ('{\n\n"', ["a", "b", '"'], [-1, 0, 1]),
    ('{\n\n"a"', [":", '"'], [-1, 0]),
]
"""Committed text, then a tree, of which something is rejected. llguidance's matchers that were rolled back after these
trees have another mask at the end than one of the text alone."""


def test_what_a_rejected_branch_does_to_the_grammar_stays_in_the_branch(grammars: Grammars) -> None:
    state = state_of(grammars, GRAMMARS["closed"])
    for text, tokens, parents in REJECTED:
        assert state.take_in([5, *_ids(text)]) is None
        tree = TokenTree(tuple(_ids("".join(tokens))), tuple(parents))
        alone = state_of(grammars, GRAMMARS["closed"], _ids(text))
        assert allowed(state, tree)[0] == allowed(alone, EMPTY_TREE)[0]


def test_a_branch_beyond_the_limits_allows_nothing_and_harms_no_other(grammars: Grammars) -> None:
    state = state_of(grammars, AMBIGUOUS_AFTER_A)
    [a], [b], [digit] = _ids("a"), _ids("b"), _ids("7")
    tree = TokenTree((a, b, digit), (ROOT, ROOT, 1))
    rows = allowed(state, tree)
    assert {a, b} <= set(rows[0])
    assert rows[1] == []
    assert digit in rows[2]
    assert digit in rows[3]
    assert state.take_in([5, b, digit]) is None
    assert digit in allowed(state, EMPTY_TREE)[0]


def test_an_output_beyond_the_limits_ends_with_an_error_that_names_the_grammar(grammars: Grammars) -> None:
    [a] = _ids("a")
    state = state_of(grammars, AMBIGUOUS_AFTER_A, [a])
    assert allowed(state, EMPTY_TREE) == [[]]
    assert "too complex" in str(state.no_token)


def test_a_grammar_that_takes_too_long_ends_its_own_sequences_alone(grammars: Grammars) -> None:
    compiled = Grammars(str(TOKENIZER), VOCAB, [END], Budget(0.02, 0.0005)).compiled(AMBIGUOUS)
    [a] = _ids("a")
    spec = SequenceSpec((5,), 1, SamplingParams(grammar=AMBIGUOUS))
    first, second = (SamplingState(spec, compiled.mask()) for _ in range(2))
    error, ids = None, [5]
    while error is None and len(ids) < 400:
        ids.append(a)
        error = first.take_in(ids)
        allowed(first, EMPTY_TREE)
    assert isinstance(error, InvalidArgument)
    assert "takes too long" in str(error)
    assert allowed(second, EMPTY_TREE) == [[]]  # the other one with this grammar
    assert "takes too long" in str(second.no_token)
    assert allowed(state_of(grammars, AMBIGUOUS), EMPTY_TREE)[0]  # one of another owner


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_json_schema('{"allOf": [{"$ref": "#"}]}'),
        LLMatcher.grammar_from_regex("(?!"),
        LLMatcher.grammar_from_lark("start: other"),
    ],
)
def test_a_grammar_that_allows_nothing_is_refused(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(InvalidArgument, match=r"spec\.sampling\.grammar"):
        grammars.compiled(grammar)


def test_a_grammar_of_one_owner_is_compiled_again_for_another(grammars: Grammars) -> None:
    first = grammars.start(GRAMMARS["object"], b"one")
    assert grammars.start(GRAMMARS["object"], b"one") is first
    assert grammars.start(GRAMMARS["object"], b"two") is not first


def _ids(text: str) -> list[int]:
    """A token for each character."""
    return [token for character in text for token in TOKENS.encode(character, add_special_tokens=False).ids]

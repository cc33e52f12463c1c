"""Allowed tokens and bad words: at every node of a tree what a text without a tree gives, and what their words say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.sampling.logits_processors import Transforms, transformed

VOCAB = 5
TOKEN = st.integers(0, VOCAB - 1)


def forbidden(prompt: list[int], output: list[int], allowed: list[int], words: list[tuple[int, ...]]) -> set[int]:
    """What must not follow ``output``, by the words of the contract."""
    banned = {word[-1] for word in words if output[len(output) - len(word) + 1 :] == list(word[:-1]) and
              len(output) >= len(word) - 1}  # fmt: skip
    others = set(range(VOCAB)) - set(allowed) if allowed else set()
    return others if allowed and set(allowed) <= banned else others | banned


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(-1, len(tokens) - 1))
        token = draw(TOKEN)
        if all((tokens[i], parents[i]) != (token, parent) for i in range(len(tokens))):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


@given(
    prompt=st.lists(TOKEN, min_size=1, max_size=4),
    output=st.lists(TOKEN, max_size=6),
    tree=trees(),
    allowed=st.lists(TOKEN, unique=True, max_size=3).map(sorted),
    words=st.lists(st.lists(TOKEN, min_size=1, max_size=4).map(tuple), max_size=4, unique=True),
    cut=st.integers(0, 6),
)
def test_every_node_gets_what_its_text_alone_gets(prompt, output, tree, allowed, words, cut):
    sampling = SamplingParams(allowed_token_ids=tuple(allowed), bad_words=tuple(words))
    transforms = Transforms(SequenceSpec([*prompt, *output[:cut]], len(prompt), sampling))
    transforms.take_in([*prompt, *output])
    logits = torch.randn(1 + len(tree), VOCAB)
    rows = transformed([logits], [(transforms, tree)])
    paths = [[], *(list(tree.path_ids(node_)) for node_ in range(len(tree)))]
    for row, before, path in zip(rows, logits, paths, strict=True):
        out = forbidden(prompt, [*output, *path], allowed, words)
        assert {token for token in range(VOCAB) if row[token] == -torch.inf} == out
        kept = [token for token in range(VOCAB) if token not in out]
        assert torch.equal(row[kept], before[kept])


def test_a_word_of_the_prompt_is_none_of_the_output():
    sampling = SamplingParams(bad_words=((1, 2),))
    logits = torch.zeros(1, VOCAB)
    after_prompt = Transforms(SequenceSpec([1], 1, sampling))
    after_output = Transforms(SequenceSpec([3, 1], 1, sampling))
    assert transformed([logits], [(after_prompt, EMPTY_TREE)]).isfinite().all()
    assert transformed([logits], [(after_output, EMPTY_TREE)])[0, 2] == -torch.inf


@pytest.mark.parametrize("fields", [{"allowed_token_ids": (1, 2)}, {"bad_words": ((1,),)}])
def test_the_models_own_logits_do_not_change(fields):
    logits = torch.zeros(1, VOCAB)
    transforms = Transforms(SequenceSpec([1], 1, SamplingParams(**fields)))
    assert not transformed([logits], [(transforms, EMPTY_TREE)]).isfinite().all()
    assert logits.isfinite().all()

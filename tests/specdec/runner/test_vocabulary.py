"""Vocabularies are compared where both models can draw, and what differs is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from specdec.core.rounds import ModelInfo
from specdec.runner.vocabulary import Vocabulary, mismatch

BASE = [b"a", b"b", b"", "é".encode()]
PAD = b"<pad>"


def model(tokens: Sequence[bytes], with_tokens: bool = True) -> ModelInfo:
    info = ModelInfo("model", "digest", len(tokens), Vocabulary(tuple(tokens)).fingerprint, 100)
    return dataclasses.replace(info, tokens=tuple(tokens)) if with_tokens else info


def problem(draft: Sequence[bytes], target: Sequence[bytes], tokenizer: Sequence[bytes]) -> str:
    return mismatch(model(draft), model(target), Vocabulary(tuple(tokenizer)) if tokenizer else None) or ""


@pytest.mark.parametrize("tokenizer", [[], BASE, [*BASE, PAD]])
def test_a_draft_of_the_same_ids_is_taken_whatever_else_a_tokenizer_has(tokenizer):
    assert problem(BASE, BASE, tokenizer) == ""


def test_a_draft_may_lack_ids_of_the_target_but_not_the_target_ids_of_the_draft():
    assert problem(BASE, [*BASE, PAD], [*BASE, PAD]) == ""
    assert problem([*BASE, PAD], BASE, [*BASE, PAD]) == "can draw 5 ids, the target only 4: id 4 is '<pad>'"
    assert "has the vocabulary" in problem(BASE, [*BASE, PAD], [])  # whether the others agree is not known


def test_the_first_id_that_differs_is_named_with_both_tokens():
    other = [b"a", b"c", b"x", b"y"]
    assert problem(other, BASE, BASE) == "has another vocabulary than the target: id 1 is 'c', not 'b'"
    assert problem([b"a", b"b", b"x"], BASE, BASE).endswith(": id 2 is 'x', not no token")
    assert problem([b"a", b"b", b"", b"\xff"], BASE, BASE).endswith(": id 3 is '\ufffd', not 'é'")


def test_a_service_that_does_not_tell_its_tokens_is_named_by_its_fingerprint():
    draft = model([b"x", *BASE[1:]], with_tokens=False)
    assert mismatch(draft, model(BASE), Vocabulary(tuple(BASE))) == (
        f"has the vocabulary {draft.tokenizer_fingerprint[:12]} of 4 tokens,"
        f" the target {model(BASE).tokenizer_fingerprint[:12]} of 4"
    )


def test_ids_without_tokens_at_the_end_of_a_draft_are_refused_in_words():
    draft = dataclasses.replace(model(BASE), vocab_size=6)  # the same tokens, and rows for two more ids
    assert mismatch(draft, model(BASE), Vocabulary(tuple(BASE))) == (
        "can draw 6 ids, the target only 4: id 4 is no token"
    )


def test_a_part_of_a_vocabulary_is_hashed_once():
    whole = Vocabulary(tuple(BASE))
    assert whole.below(9) is whole.below(4) is whole
    assert whole.below(2) is whole.below(2)
    assert whole.below(2).fingerprint == Vocabulary(tuple(BASE[:2])).fingerprint != whole.fingerprint

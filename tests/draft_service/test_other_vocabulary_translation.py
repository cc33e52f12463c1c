"""A text of the target in a draft's tokens, and a proposal in the target's: the same bytes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from draft_service.drafters.other_vocabulary.translation import LOOK_BEHIND, ByteVocabulary, DraftText, Translation
from tests.draft_service.vocabularies import (
    TEXTS,
    between,
    bundled,
    known,
    lower_case,
    other_tokenizer,
    permuted,
    pieces,
)


def text_of(draft_text: DraftText, path: Sequence[int] = ()) -> list[int]:
    return [*draft_text.ids, *(draft_text.latest(path) or ())]


@given(
    st.text(alphabet="ab x=\n🦙é東", max_size=80),
    st.lists(st.integers(1, 9)),
    st.sampled_from([pieces, other_tokenizer]),
)
def test_a_text_in_any_parts_is_the_same_bytes(text: str, parts: list[int], make: Callable[[], Tokenizer]) -> None:
    plain, draft = known(bundled), known(make)
    draft_text, ids = DraftText(between(make)), plain.tokens(text.encode())
    while draft_text.num_taken < len(ids):
        draft_text.take_in(ids, parts.pop() if parts else 5)
    if ids:
        # A vocabulary of pieces may begin a text with a space of its own.
        assert draft.text(text_of(draft_text)) in (text.encode(), b" " + text.encode())
    assert len(draft_text.latest(()) or ()) <= 4 * LOOK_BEHIND


def test_tokens_with_equal_bytes_are_kept_one_by_one(translation: Translation, target: ByteVocabulary) -> None:
    place = {old: new for new, old in enumerate(permuted())}
    assert translation.share == pytest.approx(1.0, abs=1e-3)
    for text in TEXTS:
        ids, draft_text = target.tokens(text.encode() * 3), DraftText(translation)
        for end in range(1, len(ids) + 1):
            draft_text.take_in(ids[:end], 100)
        assert text_of(draft_text) == [place[token] for token in ids]


def test_an_end_has_the_name_that_the_other_vocabulary_gives_it(translation: Translation) -> None:
    end = permuted().index(0)
    assert translation.target_of[end] == 0
    assert translation.by_text([], [end]) == [0]


def test_half_a_character_is_spelled_byte_by_byte(translation: Translation, target: ByteVocabulary) -> None:
    ids = target.tokens("🦙".encode())
    assert len(ids) > 1
    draft_text = DraftText(translation)
    draft_text.take_in(ids[:-1], 100)
    assert translation.draft.text(text_of(draft_text)) == target.text(ids[:-1])


def test_a_proposal_follows_the_text_as_the_target_writes_it(translation: Translation, target: ByteVocabulary) -> None:
    place = {old: new for new, old in enumerate(permuted())}
    for text in TEXTS:
        ids = target.tokens(text.encode())
        for cut in range(1, len(ids)):
            assert translation.by_text(ids[:cut], [place[token] for token in ids[cut:]]) == ids[cut:]


@pytest.mark.parametrize("make", [pieces, lower_case, other_tokenizer])
@given(random_=st.randoms(use_true_random=False))
def test_nothing_breaks_whatever_the_tokens(make: Any, random_: random.Random) -> None:
    translated = between(make)
    draft_text, ids = DraftText(translated), array("I")
    for _ in range(6):
        ids.extend(random_.randrange(5000) for _ in range(random_.randrange(40)))
        draft_text.take_in(ids, 30)
        draft_text.latest([random_.randrange(5000)])
        assert len(draft_text.latest(()) or ()) <= 4 * LOOK_BEHIND + 100
        drafted = [random_.randrange(translated.draft.vocab_size) for _ in range(5)]
        assert all(0 <= token_id < 4096 for token_id in translated.by_text(ids, drafted))
        assert all(0 <= token_id < 4096 for token_id in translated.by_token(drafted))

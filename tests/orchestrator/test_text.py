"""Streaming text: never half a character, and ids only after all of their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.text import Origin, Output, Piece
from tests.orchestrator.streamed_text import (
    END,
    FIRST_BYTE,
    SIZES,
    TOKENIZERS,
    reference,
    sentencepiece,
    stream,
    texts,
    whole,
)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_pieces_together_are_the_full_decode(name, data):
    tokenizer, ids = TOKENIZERS[name], data.draw(texts(name))
    text, sent, ends, _, pieces = stream(tokenizer, ids, take_every=data.draw(st.integers(1, 3)))
    assert (text, sent, ends, None) == reference(tokenizer, ids, [])
    full = tokenizer.decode(ids, skip_special_tokens=True)
    assert full.startswith(text)
    if name == "demo":
        assert full.rstrip("\ufffd") == text.rstrip("\ufffd")
    for piece in pieces:
        assert len(piece.token_ids) == len(piece.origins) == len(piece.text_ends)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_no_character_is_split_and_no_id_comes_before_its_text(name, data):
    tokenizer, ids = TOKENIZERS[name], data.draw(texts(name))
    full = tokenizer.decode(ids, skip_special_tokens=True)
    output, text, num_ids = Output(tokenizer, [], []), "", 0
    for count, token_id in enumerate(ids, 1):
        output.push(token_id, Origin.BONUS)
        piece = output.release()
        text += piece.text
        num_ids += len(piece.token_ids)
        # What was shown stays: a half character would be shown as something that the whole text has not.
        assert full.startswith(text)
        assert list(piece.token_ids) == ids[num_ids - len(piece.token_ids) : num_ids]
        assert all(end <= len(text) for end in piece.text_ends)
        assert text.startswith(tokenizer.decode(ids[:num_ids], skip_special_tokens=True))
        if whole(tokenizer, ids[:count]) is not None and text and ids[count - 1] != END:
            assert num_ids == count, "nothing is held back without a reason"


@pytest.mark.parametrize("name", ["demo", "sentencepiece"])
@given(data=st.data())
def test_the_output_continues_the_prompt_as_one_text(name, data):
    tokenizer = TOKENIZERS[name]
    prompt = [i for i in data.draw(texts(name)) if i != END]
    ids = data.draw(texts(name))
    before = tokenizer.decode(prompt)
    if before.endswith("\ufffd"):
        return
    text = stream(tokenizer, ids, prompt=prompt)[0]
    assert tokenizer.decode(prompt + ids).startswith(before + text)


@pytest.mark.parametrize("name", ["demo", "sentencepiece"])
@given(data=st.data(), number=st.integers(1, 30))
def test_the_output_continues_a_prompt_that_ends_in_replacement_characters_of_its_own(name, data, number):
    tokenizer = TOKENIZERS[name]
    prompt = [i for i in data.draw(texts(name)) if i != END]
    if tokenizer.decode(prompt).endswith("\ufffd"):
        return
    of_its_own = "\ufffd" * number
    prompt += (
        [FIRST_BYTE + b for b in of_its_own.encode()] if name == "sentencepiece" else tokenizer.encode(of_its_own).ids
    )
    ids = data.draw(texts(name))
    before = tokenizer.decode(prompt)
    assert before.endswith(of_its_own)
    text, sent = stream(tokenizer, ids, prompt=prompt)[:2]
    assert tokenizer.decode(prompt + ids).startswith(before + text)
    assert sent == ids
    assert stream(tokenizer, [2], prompt=prompt)[0] == tokenizer.decode([*prompt, 2])[len(before) :]


def test_a_long_prompt_that_ends_in_characters_of_many_tokens_keeps_the_space_after_it():
    tokenizer, woman, joiner = TOKENIZERS["sentencepiece"], [250, 169, 155], [236, 138, 151]
    prompt = [*woman, 179, *joiner, *woman, 179, *joiner, *woman, 177]
    assert stream(tokenizer, [42, 42, 2], prompt=prompt)[0] == "   the"


def test_a_short_prompt_that_begins_with_a_replacement_character_keeps_the_space_after_it():
    prompt = [FIRST_BYTE + byte for byte in "\ufffda".encode()]
    assert stream(TOKENIZERS["sentencepiece"], [42, 42, 2], prompt=prompt)[0] == "   the"


@given(ids=st.lists(st.integers(0, SIZES["sentencepiece"] - 1), max_size=12), prompt=st.binary(max_size=3))
def test_bytes_that_are_no_text_change_nothing_that_was_shown_and_lose_no_id(ids, prompt):
    tokenizer = TOKENIZERS["sentencepiece"]
    text, sent, ends, _, _ = stream(tokenizer, ids, prompt=[FIRST_BYTE + byte for byte in prompt])
    assert sent == ids
    assert ends == sorted(ends)
    assert all(end <= len(text) for end in ends)


def test_bytes_that_are_no_text_are_shown_as_such():
    a, e2, end = FIRST_BYTE + ord("a"), FIRST_BYTE + 0xE2, 4  # 4 is the word "a"
    assert TOKENIZERS["sentencepiece"].decode([a, e2, end]) == "\ufffd\ufffda", "the decoder takes the first a back"
    assert stream(TOKENIZERS["sentencepiece"], [a, e2, end, 2])[:3] == ("a\ufffda the", [a, e2, end, 2], [1, 3, 3, 7])


def test_a_leading_space_after_the_prompt_is_kept():
    # ▁the alone decodes to "the": the first word of a text has no space before it, the first of an output has.
    assert sentencepiece().decode([2]) == "the"
    assert stream(TOKENIZERS["sentencepiece"], [2], prompt=[3])[0] == " the"
    assert stream(TOKENIZERS["sentencepiece"], [2], prompt=[])[0] == "the"


def test_a_prompt_that_ends_in_half_a_character_gives_nothing_of_itself():
    tokenizer = TOKENIZERS["demo"]
    emoji = tokenizer.encode("😀").ids
    assert len(emoji) == 4, "this emoji is several tokens"
    text = stream(tokenizer, tokenizer.encode("abc").ids, prompt=emoji[:2])[0]
    assert text == "abc"


def test_an_emoji_comes_whole_with_all_its_ids():
    tokenizer = TOKENIZERS["demo"]
    emoji = tokenizer.encode("😀").ids
    output = Output(tokenizer, [], [])
    for token_id in emoji[:-1]:
        output.push(token_id, Origin.DRAFT)
        assert not output.release()
    output.push(emoji[-1], Origin.CORRECTION)
    assert output.release() == Piece(
        "😀", tuple(emoji), (*[Origin.DRAFT] * (len(emoji) - 1), Origin.CORRECTION), (1,) * len(emoji)
    )


def test_whole_characters_before_half_a_one_at_the_end_are_shown():
    tokenizer = TOKENIZERS["mixed"]
    a, half, both = (tokenizer.token_to_id(token) for token in ("a", "Ã", "©Ã"))
    output = Output(tokenizer, [], [])
    for token_id in (a, half, both):
        output.push(token_id, Origin.DRAFT)
    assert output.release().token_ids == (a,), "it may still become something else"
    assert output.finish() is None
    assert output.release(finished=True) == Piece("é", (half, both), (Origin.DRAFT,) * 2, (2, 2))


def test_without_a_tokenizer_ids_come_at_once_and_without_text():
    output = Output(None, [1, 2], [])
    output.push(7, Origin.BONUS)
    assert output.release() == Piece("", (7,), (Origin.BONUS,), (0,))
    output.push(8, Origin.DRAFT)
    assert output.release(finished=True).token_ids == (8,)


@pytest.mark.parametrize(("name", "token"), [("demo", END), ("sentencepiece", FIRST_BYTE + 0x80), ("mixed", 3)])
def test_what_never_becomes_a_character_is_handed_out_without_text(name: str, token: int):
    """1,024 tokens: a number of times what is waited for; of fewer than that, bytes are shown as what they are not."""
    tokenizer = TOKENIZERS[name]
    before = tokenizer.encode("return").ids if name == "demo" else [tokenizer.token_to_id("a")] * 3
    after = tokenizer.encode(" x").ids if name == "demo" else [tokenizer.token_to_id("b")]
    text, ids, ends, _, pieces = stream(tokenizer, [*before, *[token] * 1024, *after])
    assert text == tokenizer.decode([*before, *after])
    assert ids == [*before, *[token] * 1024, *after]
    assert max(len(piece.token_ids) for piece in pieces) <= 65
    assert ends == sorted(ends)

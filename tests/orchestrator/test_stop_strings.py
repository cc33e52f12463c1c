"""Stop strings: the earliest one ends a text, and no part of one is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.text import Origin, Output, Piece
from tests.orchestrator.streamed_text import TOKENIZERS, reference, stream, texts


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_earliest_stop_string_wins_and_nothing_of_it_is_shown(name, data):
    tokenizer, ids = TOKENIZERS[name], data.draw(texts(name))
    full = tokenizer.decode(ids, skip_special_tokens=True)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, max(0, len(full) - 1)))
        length = data.draw(st.integers(1, 6))
        stops.append(full[start : start + length] or "x")
    stops += data.draw(st.lists(st.sampled_from(["ab", "aa", "\n\n", "é", "zz"]), max_size=2))
    text, sent, ends, stop, pieces = stream(tokenizer, ids, stops, take_every=data.draw(st.integers(1, 3)))
    assert (text, sent, ends, stop) == reference(tokenizer, ids, stops)
    shown = ""
    for piece in pieces:
        shown += piece.text
        assert text.startswith(shown), "a part of the stop string was shown"
    assert not any(s in text for s in stops)


def test_a_stop_string_that_shares_its_last_token_with_half_a_character_is_found_at_the_end():
    tokenizer = TOKENIZERS["mixed"]
    ids = [tokenizer.token_to_id(token) for token in ("a", "b", "Ã", "©Ã")]
    assert stream(tokenizer, ids, ["bé"])[:4] == ("a", ids[:1], [1], "bé")


@pytest.mark.parametrize("received", [False, True])
def test_of_a_long_output_only_what_is_unsent_or_in_reach_of_a_stop_string_is_kept(received):
    tokenizer = TOKENIZERS["demo"]
    ids = tokenizer.encode("abcdefgh").ids * 500
    output = Output(tokenizer, [], ["xyz", "gh" * 20 + "x"])
    ends: list[int] = []
    for token_id in ids:
        output.push(token_id, Origin.DRAFT)
        ends += output.release().text_ends
        assert max(len(kept) for kept in vars(output).values() if isinstance(kept, str)) < 100
    if received:
        output.skip()
    last = [stop for token_id in tokenizer.encode("gh" * 30 + "x").ids if (stop := output.push(token_id, Origin.DRAFT))]
    assert last == ["gh" * 20 + "x"]
    ends += output.release(finished=True).text_ends
    assert ends == sorted(ends)
    assert ends[-1] <= len(tokenizer.decode(ids)) + 20


def test_what_may_become_a_stop_string_waits_and_is_shown_when_it_does_not():
    tokenizer = TOKENIZERS["demo"]
    a, b, c = (tokenizer.encode(letter).ids for letter in "abc")
    output = Output(tokenizer, [], ["abc"])
    for letter in (a, b):
        assert output.push(letter[0], Origin.DRAFT) is None
        assert output.release() == Piece()
    assert output.push(a[0], Origin.DRAFT) is None
    assert output.release().text == "ab"
    assert output.push(b[0], Origin.DRAFT) is None
    assert output.push(c[0], Origin.DRAFT) == "abc"
    assert output.release(finished=True) == Piece()

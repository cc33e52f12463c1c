"""A verdict is committed token by token, and a stop inside it cuts ids, origins and text together."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orchestrator.sequence import FinishReason, Sequence
from orchestrator.text import Origin
from specdec.core.rounds import CACHE_SALT, TRANSFORMS, Verdict
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from tests import checkout
from tests.models.fake_peers import new_sequence
from tests.orchestrator.streamed_text import mixed

MIXED = mixed()
TOKENIZER = Tokenizer.from_file(str(checkout.TOKENIZER))
D, C, B = Origin.DRAFT, Origin.CORRECTION, Origin.BONUS


def new(prompt=(1, 2), max_tokens=100, **options) -> Sequence:
    return new_sequence(prompt, max_tokens, seed=3, **options)


def verdict(base: int, accepted=(), next_token: int = 0, number: int = 1) -> Verdict:
    return Verdict(number, base, tuple(accepted), next_token)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def test_a_verdict_commits_what_was_accepted_and_one_token_more():
    sequence = new()
    piece = sequence.extend(TokenTree.chain([5, 6, 7]), verdict(2, (0, 1), 9))
    assert list(sequence.ids) == [1, 2, 5, 6, 9]
    assert (sequence.base, sequence.num_committed, sequence.remaining) == (5, 3, 97)
    assert piece.token_ids == (5, 6, 9)
    assert not sequence.finished


@pytest.mark.parametrize(
    ("tree", "accepted", "origins"),
    [
        (EMPTY_TREE, (), (B,)),
        (TokenTree.chain([5, 6]), (), (C,)),
        (TokenTree.chain([5, 6]), (0,), (D, C)),
        (TokenTree.chain([5, 6]), (0, 1), (D, D, B)),
        # Node 1 is a leaf beside others: nothing below it was rejected.
        (TokenTree((5, 6, 7), (-1, -1, 0)), (1,), (D, B)),
        (TokenTree((5, 6, 7), (-1, -1, 0)), (0,), (D, C)),
        (TokenTree((5, 6, 7), (-1, -1, 0)), (0, 2), (D, D, B)),
    ],
)
def test_origins_say_who_proposed_and_why_the_block_ended(tree, accepted, origins):
    sequence = new()
    assert sequence.extend(tree, verdict(2, accepted, 9)).origins == origins


def test_a_replay_verifies_nothing_of_the_tree_at_hand():
    sequence = new()
    piece = sequence.extend(TokenTree.chain([5, 6]), verdict(2, (), 9, number=0))
    assert piece.origins == (B,)


def test_a_stop_token_of_the_prompt_stops_nothing():
    sequence = new(prompt=(8, 8), stop_token_ids=frozenset({8}))
    assert sequence.extend(EMPTY_TREE, verdict(2, (), 5)).token_ids == (5,)
    assert not sequence.finished


def test_a_stop_string_inside_the_block_cuts_ids_origins_and_text_together():
    sequence = new(prompt=ids("x"), tokenizer=TOKENIZER, stop=["de"])
    block = [ids(letter)[0] for letter in "abcdef"]
    piece = sequence.extend(TokenTree.chain(block[:5]), verdict(1, range(5), block[5]))
    assert piece.text == "abc"
    assert piece.token_ids == tuple(block[:3])
    assert piece.origins == (D, D, D)
    assert piece.text_ends == (1, 2, 3)
    assert (sequence.finish_reason, sequence.matched) == (FinishReason.STOP, "de")


def test_a_stop_string_across_two_verdicts_is_never_shown():
    sequence = new(prompt=ids("x"), tokenizer=TOKENIZER, stop=["cd"])
    a, b, c, d = (ids(letter)[0] for letter in "abcd")
    first = sequence.extend(TokenTree.chain([a, b]), verdict(1, (0, 1), c))
    assert (first.text, first.token_ids) == ("ab", (a, b))
    last = sequence.extend(EMPTY_TREE, verdict(4, (), d))
    assert (last.text, last.token_ids) == ("", ())
    assert sequence.finish_reason is FinishReason.STOP


def test_no_stop_string_is_looked_for_in_the_first_min_tokens():
    sampling = SamplingParams(min_tokens=3)
    sequence = new(prompt=ids("x"), tokenizer=TOKENIZER, stop=["bc", "cd", "ef"], sampling=sampling)
    block = [ids(letter)[0] for letter in "abcdef"]
    # "bc" lies in them and "cd" begins there: neither counts, and nothing of them is held back.
    first = sequence.extend(TokenTree.chain(block[:2]), verdict(1, (0, 1), block[2]))
    assert (first.text, first.token_ids) == ("abc", tuple(block[:3]))
    rest = sequence.extend(TokenTree.chain(block[3:5]), verdict(4, (0, 1), block[5]))
    assert (rest.text, sequence.matched) == ("d", "ef")


def test_min_tokens_count_from_the_beginning_after_a_resume():
    block = [ids(letter)[0] for letter in "abab"]
    sampling = SamplingParams(min_tokens=2)
    sequence = new(prompt=ids("x"), tokenizer=TOKENIZER, stop=["ab"], sampling=sampling, received=block[:2])
    assert not sequence.finished
    piece = sequence.extend(TokenTree.chain(block[2:3]), verdict(3, (0,), block[3]))
    assert (piece.text, sequence.matched) == ("", "ab")


def test_only_what_changes_logits_needs_a_target_that_knows_how():
    assert new(sampling=SamplingParams(0.5, 3, 0.9, 0.1)).request.needs == frozenset()
    for field, value in dict(presence_penalty=1.0, logit_bias=((1, 2.0),), min_tokens=1).items():
        assert new(sampling=SamplingParams(**{field: value})).request.needs == {TRANSFORMS}


def test_a_salt_needs_a_target_and_a_draft_that_keep_to_it():
    salted = new(cache_salt=b"tenant", sampling=SamplingParams(min_tokens=1))
    assert salted.spec.cache_salt == b"tenant"
    assert (salted.request.needs, salted.request.draft_needs) == ({TRANSFORMS, CACHE_SALT}, {CACHE_SALT})
    assert not new().request.draft_needs


def test_a_stop_token_lets_out_what_was_held_back():
    sequence = new(prompt=ids("x"), tokenizer=TOKENIZER, stop=["ab"], stop_token_ids=frozenset({0}))
    a = ids("a")[0]
    assert not sequence.extend(EMPTY_TREE, verdict(1, (), a))
    last = sequence.extend(EMPTY_TREE, verdict(2, (), 0))
    assert (last.text, last.token_ids, last.origins) == ("a", (a,), (B,))


def test_the_spec_is_prompt_and_committed_with_the_prompts_length():
    sequence = new(sampling=SamplingParams(0.5), method=Method.BLOCK)
    sequence.extend(TokenTree.chain([5]), verdict(2, (0,), 9))
    assert sequence.spec == SequenceSpec(array("I", [1, 2, 5, 9]), 2, SamplingParams(0.5), 3, Method.BLOCK)


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sequence_and_spec_agree_on_what_is_keyed_by_token(method, temperature):
    sequence = new(sampling=SamplingParams(temperature), method=method)
    assert sequence.keyed_by_token == sequence.spec.keyed_by_token == (method is Method.COUPLED or temperature == 0)


@given(st.data())
def test_any_blocks_give_the_tokens_up_to_the_first_stop_or_the_length(data):
    token = st.integers(0, 9)
    stops = data.draw(st.frozensets(token, max_size=2))
    max_tokens = data.draw(st.integers(1, 12))
    sequence = new(max_tokens=max_tokens, stop_token_ids=stops)
    all_tokens, all_origins, pieces = [], [], []
    while not sequence.finished:
        chain = data.draw(st.lists(token, max_size=4))
        num_accepted = data.draw(st.integers(0, len(chain)))
        next_token = data.draw(token)
        all_tokens += [*chain[:num_accepted], next_token]
        all_origins += [*[D] * num_accepted, C if num_accepted < len(chain) else B]
        round_ = verdict(sequence.base, range(num_accepted), next_token)
        pieces.append(sequence.extend(TokenTree.chain(chain), round_))
    first_stop = next((i for i, token_id in enumerate(all_tokens) if token_id in stops), len(all_tokens))
    expected = min(first_stop, max_tokens)
    assert [i for piece in pieces for i in piece.token_ids] == all_tokens[:expected]
    assert [o for piece in pieces for o in piece.origins] == all_origins[:expected]
    stopped = first_stop < max_tokens
    assert sequence.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert sequence.matched == (all_tokens[first_stop] if stopped else None)


A, HALF, BOTH = (MIXED.token_to_id(token) for token in ("a", "Ã", "©Ã"))  # BOTH ends one é and begins another


@pytest.mark.parametrize(
    ("options", "tokens", "reason", "matched"),
    [
        ({"max_tokens": 3}, [A, HALF, BOTH], FinishReason.LENGTH, None),
        ({"max_tokens": 9, "stop_token_ids": frozenset({2})}, [A, HALF, BOTH, 2], FinishReason.STOP, 2),
    ],
)
def test_at_the_end_whole_characters_are_shown_and_all_ids_are_out(options, tokens, reason, matched):
    sequence = new(prompt=(1,), tokenizer=MIXED, **options)
    piece = sequence.extend(TokenTree.chain(tokens[:-1]), verdict(1, range(len(tokens) - 1), tokens[-1]))
    assert (piece.text, piece.token_ids, piece.text_ends) == ("aé", (A, HALF, BOTH), (1, 2, 2))
    assert (sequence.finish_reason, sequence.matched) == (reason, matched)


def test_a_stop_string_in_the_last_characters_comes_before_the_stop_token_and_the_length():
    for options, last in (({"max_tokens": 3}, []), ({"max_tokens": 9, "stop_token_ids": frozenset({2})}, [2])):
        sequence = new(prompt=(1,), tokenizer=MIXED, stop=["é"], **options)
        tokens = [A, HALF, BOTH, *last]
        piece = sequence.extend(TokenTree.chain(tokens[:-1]), verdict(1, range(len(tokens) - 1), tokens[-1]))
        assert (piece.text, piece.token_ids) == ("a", (A,))
        assert (sequence.finish_reason, sequence.matched) == (FinishReason.STOP, "é")


@pytest.mark.parametrize("num_received", [0, 1, 3])  # HALF is never sent before BOTH
def test_resumed_at_any_id_the_rest_of_the_text_is_what_it_would_have_been(num_received):
    """Ids are sent only once all their text is; so a client that has them has the text up to where theirs ends."""
    whole = new(prompt=(1,), tokenizer=MIXED, max_tokens=3)
    tokens = [A, HALF, BOTH]
    all_of_it = whole.extend(TokenTree.chain(tokens[:-1]), verdict(1, range(2), tokens[-1]))
    had = all_of_it.text_ends[num_received - 1] if num_received else 0
    sequence = new(prompt=(1,), tokenizer=MIXED, max_tokens=3, received=tokens[:num_received])
    rest = []
    while not sequence.finished:
        rest.append(sequence.extend(EMPTY_TREE, verdict(sequence.base, (), tokens[sequence.num_committed])))
    assert all_of_it.text[:had] + "".join(piece.text for piece in rest) == all_of_it.text
    assert [*tokens[:num_received], *(i for piece in rest for i in piece.token_ids)] == tokens
    assert sequence.finish_reason is FinishReason.LENGTH

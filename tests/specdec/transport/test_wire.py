"""Domain values survive the wire, and what does not belong on it is refused by the name of its field."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.errors import InvalidArgument
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd, Load, ModelInfo, Round, Timings, Verdict
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.transport import wire
from specdec.v1 import common_pb2, draft_pb2, target_pb2

VOCAB = 50
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
token = st.integers(0, VOCAB - 1)
tokens = st.lists(token, max_size=6).map(tuple)
text = st.text(st.characters(codec="utf-8"), max_size=12)
fp16 = st.floats(2.0**-24, 1.0, width=16)


@st.composite
def distribution(draw, drafted: int) -> SparseDistribution:
    others = draw(st.lists(token.filter(lambda t: t != drafted), unique=True, max_size=4))
    ids = draw(st.permutations([drafted, *others]))
    weights = draw(st.lists(fp16, min_size=len(ids), max_size=len(ids)))
    weights[draw(st.integers(0, len(ids) - 1))] = 1.0
    return SparseDistribution(tuple(ids), tuple(weights))


@st.composite
def trees(draw) -> TokenTree:
    edges: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 8))):
        edge = (draw(st.integers(-1, len(edges) - 1)), draw(token))
        if edge not in edges:
            edges.append(edge)
    return TokenTree(tuple(token_id for _, token_id in edges), tuple(parent for parent, _ in edges))


@st.composite
def chains(draw) -> TokenTree:
    ids = draw(tokens)
    return TokenTree.chain(ids, [draw(st.none() | distribution(t)) for t in ids] if draw(st.booleans()) else ())


any_tree = trees() | chains()
sampling = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(1e-3, 100),
    top_k=uint32,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.just(1.0) | st.floats(0.01, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token, st.floats(-100, 100, width=32), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    min_tokens=uint32,
    end_token_ids=st.lists(token, max_size=4).map(tuple),
)


@st.composite
def specs(draw) -> SequenceSpec:
    ids = draw(st.lists(token, min_size=1, max_size=8).map(tuple))
    num_prompt_tokens, method = draw(st.integers(0, len(ids))), draw(st.sampled_from(list(Method)))
    return SequenceSpec(ids, num_prompt_tokens, draw(sampling), draw(uint64), method, draw(st.binary(max_size=256)))


def sent(message):
    """As it arrives at the other side."""
    return type(message).FromString(message.SerializeToString())


@given(specs(), text, text)
def test_a_spec_survives(spec, digest, traceparent):
    message = sent(wire.write_spec(spec, digest, traceparent))
    assert wire.read_spec(message, VOCAB) == spec
    assert (message.model_digest, message.traceparent) == (digest, traceparent)


@given(any_tree)
def test_a_tree_survives(tree):
    assert tree.problem(VOCAB) is None
    assert wire.read_tree(sent(wire.write_tree(tree)), VOCAB) == tree


def test_how_sure_the_draft_was_survives():
    tree = TokenTree((1, 2, 3), (-1, -1, 0), confidence=(7, 7, 15))
    assert wire.read_tree(sent(wire.write_tree(tree)), VOCAB).confidence == (7, 7, 15)
    newer = common_pb2.TokenTree(token_ids=[1, 2], sure=[3, 99])
    assert wire.read_tree(sent(newer), VOCAB).confidence == (3, 15), "a hint is no reason to refuse a tree"


def test_a_chain_needs_no_parents_on_the_wire():
    assert not wire.write_tree(TokenTree.chain([3, 4, 5])).parents
    assert wire.write_tree(TokenTree((3, 4), (-1, -1))).parents == [-1, -1]


@given(uint64, uint32, uint32, any_tree, uint32)
def test_a_round_survives(sequence, number, base, tree, run_on):
    round_ = Round(number, base, tree, run_on)
    message = sent(wire.write_round(sequence, round_))
    assert wire.read_round(message, VOCAB) == round_
    assert message.sequence == sequence


@given(uint64, st.builds(Verdict, uint32, uint32, tokens, token, tokens, st.builds(Timings, *(uint32,) * 5)))
def test_a_verdict_survives(sequence, verdict):
    message = sent(wire.write_verdict(sequence, verdict))
    assert wire.read_verdict(message, VOCAB) == verdict
    assert message.sequence == sequence


def test_a_verdict_outside_the_vocabulary_is_refused():
    message = wire.write_verdict(1, Verdict(1, 2, (), VOCAB))
    with pytest.raises(InvalidArgument, match="next_token"):
        wire.read_verdict(message, VOCAB)


@given(uint64, st.builds(Advance, uint32, uint32, tokens, any_tree, st.builds(Budget, uint32, uint32, uint32)))
def test_an_advance_survives(sequence, advance):
    message = sent(wire.write_advance(sequence, advance))
    assert wire.read_advance(message, VOCAB) == advance
    assert message.sequence == sequence


@given(uint64, st.builds(Growth, uint32, uint32, tokens, any_tree, st.none() | st.sampled_from(list(GrowthEnd))))
def test_a_growth_survives(sequence, growth):
    message = sent(wire.write_growth(sequence, growth))
    assert wire.read_growth(message, VOCAB) == growth
    assert message.sequence == sequence


@given(st.builds(ModelInfo, text, text, uint32, text, uint32, text, st.lists(text, max_size=3).map(tuple), tokens))
def test_a_models_description_survives(info):
    assert wire.read_info(sent(wire.write_info(info))) == info


@given(st.builds(Load, uint32, uint32, uint32, uint32, uint64, uint32))
def test_a_load_survives(load):
    assert wire.read_load(sent(wire.write_load(load))) == load


@pytest.mark.parametrize("method", list(Method))
def test_every_method_has_a_value_of_its_own(method):
    assert wire.read_method(wire.write_method(method)) is method
    assert wire.read_method(common_pb2.VERIFICATION_METHOD_UNSPECIFIED) is None
    assert wire.read_method(99) is None


# --- refusals -----------------------------------------------------------------------------------------------


def refused(read, *arguments) -> dict[str, str]:
    with pytest.raises(InvalidArgument) as caught:
        read(*arguments)
    assert all(what for _, what in caught.value.violations)
    return dict(caught.value.violations)


def dist(ids, weights):
    return common_pb2.SparseDistribution(token_ids=ids, weights=weights)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (dict(parents=[-1]), "tree", "no token_ids"),
        (dict(draft_probs=[dist([1], [1])]), "tree", "no token_ids"),
        (dict(token_ids=[VOCAB]), "tree", "vocabulary"),
        (dict(token_ids=[2**32 - 1]), "tree", "vocabulary"),
        (dict(token_ids=[1, 2], parents=[-1]), "tree", "parents"),
        (dict(token_ids=[1], parents=[-1, 0]), "tree", "parents"),
        (dict(token_ids=[1, 2], parents=[-1, 1]), "tree", r"parents[1]"),
        (dict(token_ids=[1], parents=[-2]), "tree", r"parents[0]"),
        (dict(token_ids=[1, 1], parents=[-1, -1]), "tree", "sibling"),
        (dict(token_ids=[1, 2], draft_probs=[dist([1], [1])]), "tree", "draft_probs"),
        (dict(sure=[1]), "tree", "no token_ids"),
        (dict(token_ids=[1, 2], sure=[1]), "tree", "1 confidence"),
        (
            dict(token_ids=[1, 2], parents=[-1, -1], draft_probs=[dist([1], [1]), dist([2], [1])]),
            "tree.draft_probs",
            "chain",
        ),
        (dict(token_ids=[1], draft_probs=[dist([1, 2], [1])]), "tree.draft_probs[0]", "weights"),
        (dict(token_ids=[1], draft_probs=[dist([1] * 1025, [1])]), "tree.draft_probs[0]", "at most 1024 tokens"),
        (dict(token_ids=[1], draft_probs=[dist([1], [1] * 1025)]), "tree.draft_probs[0]", "at most 1024 tokens"),
        (dict(token_ids=[1], draft_probs=[dist([1], [])]), "tree.draft_probs[0]", "weights"),
        (dict(token_ids=[1], draft_probs=[dist([], [1])]), "tree.draft_probs[0]", "weights"),
        (dict(token_ids=[1], draft_probs=[dist([1, 1], [1, 1])]), "tree.draft_probs[0]", "repeat"),
        (dict(token_ids=[1], draft_probs=[dist([1, VOCAB], [1, 1])]), "tree.draft_probs[0]", "vocabulary"),
        (dict(token_ids=[1], draft_probs=[dist([1, 2], [1, -0.5])]), "tree.draft_probs[0]", "weights"),
        (dict(token_ids=[1], draft_probs=[dist([1, 2], [1, float("nan")])]), "tree.draft_probs[0]", "finite"),
        (dict(token_ids=[1], draft_probs=[dist([1, 2], [1, float("inf")])]), "tree.draft_probs[0]", "finite"),
        (dict(token_ids=[1], draft_probs=[dist([1, 2], [0.5, 0.25])]), "tree.draft_probs[0]", "largest"),
        (dict(token_ids=[1], draft_probs=[dist([1, 2], [2, 1])]), "tree.draft_probs[0]", "largest"),
        (dict(token_ids=[1], draft_probs=[dist([1, 2], [1, 0.1])]), "tree.draft_probs[0]", "fp16"),
        (dict(token_ids=[1], draft_probs=[dist([2], [1])]), "tree.draft_probs[0]", "no weight"),
        (dict(token_ids=[3, 1], draft_probs=[dist([], []), dist([2], [1])]), "tree.draft_probs[1]", "no weight"),
        # A weight of nothing cannot be told from absence, and the verifier takes no distribution that has one.
        (dict(token_ids=[1], draft_probs=[dist([1, 2], [1, 0])]), "tree.draft_probs[0]", "weights"),
    ],
)
def test_a_malformed_tree_is_refused_by_field(fields, field, words):
    problems = refused(wire.read_tree, common_pb2.TokenTree(**fields), VOCAB)
    assert list(problems) == [field]
    assert words in problems[field]


def test_the_smallest_fp16_weight_is_accepted():
    smallest = struct.unpack("e", b"\x01\x00")[0]
    message = common_pb2.TokenTree(token_ids=[1], draft_probs=[dist([1, 2], [smallest, 1])])
    assert wire.read_tree(message, VOCAB).draft_probs[0] == SparseDistribution((1, 2), (smallest, 1.0))


def valid_spec(**changes) -> common_pb2.SequenceSpec:
    message = wire.write_spec(SequenceSpec((1, 2, 3), 2))
    for name, value in changes.items():
        if name == "sampling":
            kept = {field.name: number for field, number in message.sampling.ListFields()}
            message.sampling.CopyFrom(common_pb2.SamplingParams(**{**kept, **value}))
        elif name == "token_ids":
            message.token_ids[:] = value
        else:
            setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(token_ids=[], num_prompt_tokens=0), "spec.token_ids"),
        (dict(token_ids=[1, VOCAB, 3]), "spec.token_ids"),
        (dict(num_prompt_tokens=4), "spec.num_prompt_tokens"),
        (dict(cache_salt=b"x" * 257), "spec.cache_salt"),
        (dict(method=0), "spec.method"),
        (dict(method=9), "spec.method"),
        (dict(sampling=dict(temperature=-1.0)), "spec.sampling.temperature"),
        (dict(sampling=dict(temperature=float("nan"))), "spec.sampling.temperature"),
        (dict(sampling=dict(temperature=float("inf"))), "spec.sampling.temperature"),
        (dict(sampling=dict(temperature=1e-5)), "spec.sampling.temperature"),
        (dict(sampling=dict(temperature=101.0)), "spec.sampling.temperature"),
        (dict(sampling=dict(top_p=0.0)), "spec.sampling.top_p"),
        (dict(sampling=dict(top_p=1.01)), "spec.sampling.top_p"),
        (dict(sampling=dict(top_p=float("nan"))), "spec.sampling.top_p"),
        (dict(sampling=dict(min_p=-0.1)), "spec.sampling.min_p"),
        (dict(sampling=dict(min_p=1.1)), "spec.sampling.min_p"),
        (dict(sampling=dict(min_p=float("nan"))), "spec.sampling.min_p"),
        (dict(sampling=dict(repetition_penalty=0.0)), "spec.sampling.repetition_penalty"),
        (dict(sampling=dict(repetition_penalty=float("nan"))), "spec.sampling.repetition_penalty"),
        (dict(sampling=dict(presence_penalty=-2.1)), "spec.sampling.presence_penalty"),
        (dict(sampling=dict(frequency_penalty=float("inf"))), "spec.sampling.frequency_penalty"),
        (dict(sampling=dict(logit_bias={VOCAB: 1.0})), "spec.sampling.logit_bias"),
        (dict(sampling=dict(logit_bias={1: 1e9})), "spec.sampling.logit_bias[1]"),
        (dict(sampling=dict(end_token_ids=[VOCAB])), "spec.sampling.end_token_ids"),
    ],
)
def test_a_malformed_spec_is_refused_by_field(changes, field):
    assert wire.read_spec(valid_spec(), VOCAB)
    assert list(refused(wire.read_spec, valid_spec(**changes), VOCAB)) == [field]


def test_a_caller_of_an_older_contract_asks_for_no_repetition_penalty():
    message = valid_spec()
    assert not message.sampling.HasField("repetition_penalty")
    assert wire.read_spec(message, VOCAB).sampling == SamplingParams()


def test_a_sampling_field_of_a_later_contract_is_refused_by_number():
    message = valid_spec()
    message.sampling.MergeFromString(b"\xc0\x3e\x01")  # field 1000, a varint
    assert list(refused(wire.read_spec, message, VOCAB)) == ["spec.sampling.field 1000"]


def test_all_problems_of_a_spec_are_named_at_once():
    message = valid_spec(token_ids=[], method=0, sampling=dict(temperature=-1.0, top_p=2.0, min_p=2.0))
    assert set(refused(wire.read_spec, message, VOCAB)) == {
        "spec.token_ids",
        "spec.num_prompt_tokens",
        "spec.method",
        "spec.sampling.temperature",
        "spec.sampling.top_p",
        "spec.sampling.min_p",
    }


def test_a_malformed_advance_growth_or_round_is_refused_by_field():
    bad = common_pb2.TokenTree(token_ids=[VOCAB])
    assert list(refused(wire.read_advance, draft_pb2.Advance(token_ids=[VOCAB]), VOCAB)) == ["token_ids"]
    assert list(refused(wire.read_advance, draft_pb2.Advance(in_flight=bad), VOCAB)) == ["in_flight"]
    assert list(refused(wire.read_growth, draft_pb2.Growth(path=[VOCAB]), VOCAB)) == ["path"]
    assert list(refused(wire.read_growth, draft_pb2.Growth(tree=bad), VOCAB)) == ["tree"]
    assert list(refused(wire.read_round, target_pb2.Round(tree=bad), VOCAB)) == ["tree"]


def test_a_queue_of_hours_is_told_as_the_longest_there_is():
    """What went on for a peer that did not read: its whole stream ended with UNKNOWN."""
    told = wire.write_verdict(1, Verdict(1, 4, (), 2, timings=Timings(queue_us=2 * 3600 * 10**6)))
    assert told.timings.queue_us == 2**32 - 1

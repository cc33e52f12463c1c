"""Domain values survive the wire, and malformed ones are refused by the name of their field."""

from __future__ import annotations

import struct
from array import array
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.errors import InvalidArgument
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd, Load, ModelInfo, Round, TargetOpen, Timings, Verdict
from specdec.core.sequence import Method, Priority, SamplingParams, SequenceSpec
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.transport import wire
from specdec.transport.opening import target_open
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
    confidence = draw(st.just(()) | st.tuples(*[st.integers(1, 15)] * len(edges)))
    return TokenTree(tuple(token_id for _, token_id in edges), tuple(parent for parent, _ in edges), (), confidence)


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
    ids = draw(st.lists(token, min_size=1, max_size=8).map(partial(array, "I")))
    num_prompt_tokens, method = draw(st.integers(0, len(ids))), draw(st.sampled_from(list(Method)))
    salt, priority = draw(st.binary(max_size=256)), draw(st.sampled_from(list(Priority)))
    return SequenceSpec(ids, num_prompt_tokens, draw(sampling), draw(uint64), method, salt, priority)


def sent(message):
    """As it arrives at the other side."""
    return type(message).FromString(message.SerializeToString())


@given(specs(), text, text)
def test_a_spec_survives(spec, digest, traceparent):
    message = sent(wire.write_spec(spec, digest, traceparent))
    assert wire.read_spec(message, VOCAB) == spec
    assert (message.model_digest, message.traceparent) == (digest, traceparent)


opens = st.builds(
    TargetOpen,
    specs().filter(lambda spec: spec.keyed_by_token),
    stop_token_ids=st.frozensets(token),
    num_preemptions=uint32,
    num_logprobs=st.none() | st.integers(0, 20),
    num_prompt_logprobs=st.none() | st.integers(0, 20),
    max_self_draft_nodes=uint32,
    adapter=text,
)


@given(uint64, opens)
def test_an_open_survives(sequence, open_):
    [message] = target_open(sequence, open_)
    assert (message.sequence, wire.read_target_open(sent(message), VOCAB)) == (sequence, open_)


@given(any_tree)
def test_a_tree_survives(tree):
    assert tree.problem(VOCAB) is None
    message = sent(wire.write_tree(tree))
    assert wire.read_tree(message, VOCAB) == tree
    assert bool(message.parents) is not tree.is_chain, "a chain needs none"


@given(uint64, st.builds(Round, uint32, uint32, any_tree, uint32))
def test_a_round_survives(sequence, round_):
    message = sent(wire.write_round(sequence, round_))
    assert (message.sequence, wire.read_round(message, VOCAB)) == (sequence, round_)


@given(uint64, st.builds(Verdict, uint32, uint32, tokens, token, st.builds(Timings, *(uint32,) * 5)))
def test_a_verdict_survives(sequence, verdict):
    message = sent(wire.write_verdict(sequence, verdict))
    assert (message.sequence, wire.read_verdict(message, VOCAB)) == (sequence, verdict)


@given(uint64, st.builds(Advance, uint32, uint32, tokens, any_tree, st.builds(Budget, uint32, uint32, uint32)))
def test_an_advance_survives(sequence, advance):
    message = sent(wire.write_advance(sequence, advance))
    assert (message.sequence, wire.read_advance(message, VOCAB)) == (sequence, advance)


@given(uint64, st.builds(Growth, uint32, uint32, tokens, any_tree, st.none() | st.sampled_from(list(GrowthEnd))))
def test_a_growth_survives(sequence, growth):
    message = sent(wire.write_growth(sequence, growth))
    assert (message.sequence, wire.read_growth(message, VOCAB)) == (sequence, growth)


texts = st.lists(text, max_size=3).map(tuple)


@given(
    st.builds(ModelInfo, text, text, uint32, text, uint32, text, texts, tokens, adapters=texts),
    st.builds(Load, uint32, uint32, uint32, uint32, uint64, uint32),
)
def test_a_models_description_and_load_survive(info, load):
    assert wire.read_info(sent(wire.write_info(info))) == info
    assert wire.read_load(sent(wire.write_load(load))) == load


@pytest.mark.parametrize("method", list(Method))
def test_every_method_has_a_value_of_its_own(method):
    assert wire.read_method(wire.write_method(method)) is method
    assert wire.read_method(common_pb2.VERIFICATION_METHOD_UNSPECIFIED) is None
    assert wire.read_method(99) is None


def refused(read, *arguments) -> dict[str, str]:
    with pytest.raises(InvalidArgument) as caught:
        read(*arguments)
    assert all(what for _, what in caught.value.violations)
    return dict(caught.value.violations)


def dist(ids, weights):
    return common_pb2.SparseDistribution(token_ids=ids, weights=weights)


MALFORMED_TREES = [
    (dict(parents=[-1]), "no token_ids"),
    (dict(draft_probs=[dist([1], [1])]), "no token_ids"),
    (dict(confidence=[1]), "no token_ids"),
    (dict(token_ids=[VOCAB]), "vocabulary"),
    (dict(token_ids=[1, 2], parents=[-1]), "parents"),
    (dict(token_ids=[1], parents=[-1, 0]), "parents"),
    (dict(token_ids=[1, 2], parents=[-1, 1]), r"parents[1]"),
    (dict(token_ids=[1], parents=[-2]), r"parents[0]"),
    (dict(token_ids=[1, 1], parents=[-1, -1]), "sibling"),
    (dict(token_ids=[1, 2], draft_probs=[dist([1], [1])]), "draft_probs"),
    (dict(token_ids=[1, 2], confidence=[1]), "1 confidence"),
]
MALFORMED_DISTRIBUTIONS = [
    (dist([1, 2], [1]), "weights"),
    (dist([], [1]), "weights"),
    (dist([1] * 1025, [1] * 1025), "at most 1024 tokens"),
    (dist([1, 1], [1, 1]), "repeat"),
    (dist([1, VOCAB], [1, 1]), "vocabulary"),
    (dist([1, 2], [1, -0.5]), "weights"),
    (dist([1, 2], [1, float("nan")]), "finite"),
    (dist([1, 2], [1, float("inf")]), "finite"),
    (dist([1, 2], [0.5, 0.25]), "largest"),
    (dist([1, 2], [2, 1]), "largest"),
    (dist([1, 2], [1, 0.1]), "fp16"),
    (dist([2], [1]), "no weight"),
    # A weight of 0 cannot be told from absence, and the verifier takes no distribution that has one.
    (dist([1, 2], [1, 0]), "weights"),
]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        *((fields, "tree", words) for fields, words in MALFORMED_TREES),
        *((dict(token_ids=[1], draft_probs=[d]), "tree.draft_probs[0]", words) for d, words in MALFORMED_DISTRIBUTIONS),
        (dict(token_ids=[3, 1], draft_probs=[dist([], []), dist([2], [1])]), "tree.draft_probs[1]", "no weight"),
        (dict(token_ids=[1, 2], parents=[-1, -1], draft_probs=[dist([1], [1])] * 2), "tree.draft_probs", "chain"),
    ],
)
def test_a_malformed_tree_is_refused_by_field(fields, field, words):
    problems = refused(wire.read_tree, common_pb2.TokenTree(**fields), VOCAB)
    assert list(problems) == [field]
    assert words in problems[field]


def test_the_smallest_fp16_weight_and_any_confidence_are_accepted():
    newer = common_pb2.TokenTree(token_ids=[1, 2], confidence=[3, 99])
    assert wire.read_tree(sent(newer), VOCAB).confidence == (3, 15), "a hint is no reason to refuse a tree"
    smallest = struct.unpack("e", b"\x01\x00")[0]
    message = common_pb2.TokenTree(token_ids=[1], draft_probs=[dist([1, 2], [smallest, 1])])
    assert wire.read_tree(message, VOCAB).draft_probs[0] == SparseDistribution((1, 2), (smallest, 1.0))


def valid_spec(sampling=(), **fields) -> common_pb2.SequenceSpec:
    usual = dict(temperature=1.0, top_p=1.0)
    message = dict(token_ids=[1, 2, 3], num_prompt_tokens=2, method=wire.write_method(Method.COUPLED))
    return common_pb2.SequenceSpec(**message | fields, sampling=common_pb2.SamplingParams(**usual | dict(sampling)))


NAN, INF = float("nan"), float("inf")
BAD_SAMPLING = {
    "temperature": [-1.0, NAN, INF, 1e-5, 101.0],
    "top_p": [0.0, 1.01, NAN],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0.0, NAN],
    "presence_penalty": [-2.1],
    "frequency_penalty": [INF],
    "logit_bias": [{VOCAB: 1.0}],
    "end_token_ids": [[VOCAB]],
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(token_ids=[], num_prompt_tokens=0), "token_ids"),
        (dict(token_ids=[1, VOCAB, 3]), "token_ids"),
        (dict(num_prompt_tokens=4), "num_prompt_tokens"),
        (dict(cache_salt=b"x" * 257), "cache_salt"),
        (dict(method=0), "method"),
        (dict(method=9), "method"),
        (dict(priority=4), "priority"),
        (dict(sampling=dict(logit_bias={1: 1e9})), "sampling.logit_bias[1]"),
        *((dict(sampling={name: bad}), f"sampling.{name}") for name, values in BAD_SAMPLING.items() for bad in values),
    ],
)
def test_a_malformed_spec_is_refused_by_field(changes, field):
    assert wire.read_spec(valid_spec(), VOCAB)
    assert list(refused(wire.read_spec, valid_spec(**changes), VOCAB)) == [f"spec.{field}"]


def test_an_older_caller_asks_for_no_repetition_penalty_and_a_field_of_a_later_one_is_refused_by_number():
    message = valid_spec()
    assert not message.sampling.HasField("repetition_penalty")
    assert wire.read_spec(message, VOCAB).sampling == SamplingParams()
    message.sampling.MergeFromString(b"\xc0\x3e\x01")  # field 1000, a varint
    assert list(refused(wire.read_spec, message, VOCAB)) == ["spec.sampling.field 1000"]


def test_all_problems_of_a_spec_are_named_at_once():
    message = valid_spec(token_ids=[], method=0, sampling=dict(temperature=-1.0, top_p=2.0, min_p=2.0))
    names = ("token_ids", "num_prompt_tokens", "method", "sampling.temperature", "sampling.top_p", "sampling.min_p")
    assert set(refused(wire.read_spec, message, VOCAB)) == {f"spec.{name}" for name in names}


def test_a_malformed_advance_growth_round_or_verdict_is_refused_by_field():
    bad = common_pb2.TokenTree(token_ids=[VOCAB])
    assert list(refused(wire.read_advance, draft_pb2.Advance(token_ids=[VOCAB]), VOCAB)) == ["token_ids"]
    assert list(refused(wire.read_advance, draft_pb2.Advance(in_flight=bad), VOCAB)) == ["in_flight"]
    assert list(refused(wire.read_growth, draft_pb2.Growth(path=[VOCAB]), VOCAB)) == ["path"]
    assert list(refused(wire.read_growth, draft_pb2.Growth(tree=bad), VOCAB)) == ["tree"]
    assert list(refused(wire.read_round, target_pb2.Round(tree=bad), VOCAB)) == ["tree"]
    assert list(refused(wire.read_verdict, target_pb2.Verdict(next_token=VOCAB), VOCAB)) == ["next_token"]


def test_a_wait_of_hours_is_sent_as_the_longest_that_fits():
    """A verdict for a peer that did not read once ended its whole stream with UNKNOWN."""
    told = wire.write_verdict(1, Verdict(1, 4, (), 2, timings=Timings(queue_us=2 * 3600 * 10**6)))
    assert told.timings.queue_us == 2**32 - 1

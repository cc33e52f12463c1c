"""What a client may ask for: every problem is named at once, and nothing is ignored in silence."""

from __future__ import annotations

import dataclasses
from array import array

import pytest
from tokenizers import Tokenizer

from orchestrator.api.prompts import Prompts
from orchestrator.api.request_reader import RequestReader
from orchestrator.request import Caller, DraftOptions, OutputOptions, Request, Stops
from specdec.core.errors import ContextExceeded, InvalidArgument
from specdec.core.rounds import CACHE_SALT, GRAMMAR, TRANSFORMS, ModelInfo
from specdec.core.sequence import Method, Priority, SamplingParams
from specdec.v1 import common_pb2, generation_pb2
from tests import checkout

TOKENIZER = Tokenizer.from_file(str(checkout.TOKENIZER))
OLDER = ModelInfo("target", "digest", 100, "", context_length=20, eos_token_ids=(7,))
TARGET = dataclasses.replace(OLDER, capabilities=(TRANSFORMS,))
PROMPT = dict(token_ids={"token_ids": [1, 2, 3]})


def message(**fields) -> generation_pb2.GenerateRequest:
    if not fields.keys() & {"text", "token_ids", "chat"}:
        fields |= PROMPT
    return generation_pb2.GenerateRequest(**fields)


def read(request=None, tokenizer=None, target=TARGET, **fields) -> Request:
    request, reader = request or message(**fields), RequestReader(Prompts(tokenizer), num_draft_tokens=4)
    return reader.read(request, target, reader.check(request, target))


def refused(request=None, tokenizer=None, target=TARGET, **fields) -> dict[str, str]:
    with pytest.raises(InvalidArgument) as caught:
        read(request, tokenizer, target, **fields)
    assert all(what for _, what in caught.value.violations)
    return dict(caught.value.violations)


def test_defaults_are_written_down():
    request = read(seed=5)
    assert request == Request(
        prompt_ids=array("I", [1, 2, 3]),
        sampling=SamplingParams(),
        stops=Stops(max_tokens=17, token_ids=frozenset({7})),
        output=OutputOptions(
            num_samples=1, skip_special_tokens=True, num_logprobs=None, num_prompt_logprobs=None, prompt=False
        ),
        drafting=DraftOptions(Method.COUPLED, num_tokens=4, prediction=array("I")),
        seed=5,
        resume={},
        caller=Caller(cache_salt=b""),
    )


def test_a_stop_string_that_is_a_special_token_stops_as_its_id_does():
    """It has no text in an output, in which it would never be found."""
    assert TOKENIZER.token_to_id("<|endoftext|>") == 0
    request = read(stop=["x", "<|endoftext|>"], tokenizer=TOKENIZER, min_tokens=1)
    assert request.stops.token_ids == frozenset({0, 7})
    assert request.sampling.end_token_ids == (0, 7)
    unusable = Tokenizer.from_str(TOKENIZER.to_str())
    unusable.add_special_tokens(["<|im_end|>"])
    unusable.add_tokens(["<tool>"])  # has text
    assert read(stop=["<|im_end|>", "<tool>"], tokenizer=unusable).stops.token_ids == frozenset({7})
    all_rows = dataclasses.replace(TARGET, vocab_size=5000)
    asked = read(stop=["<|im_end|>", "<tool>"], tokenizer=unusable, target=all_rows)
    assert asked.stops.token_ids == frozenset({7, unusable.token_to_id("<|im_end|>")})


def test_what_was_asked_for_is_what_is_done():
    request = read(
        text="def f(x):",
        tokenizer=TOKENIZER,
        max_tokens=9,
        temperature=0.25,
        top_k=3,
        top_p=0.5,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        logit_bias={9: -100.0, 4: 0.5},
        min_tokens=9,
        seed=2**64 - 1,
        n=64,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        verification=common_pb2.VERIFICATION_METHOD_BLOCK,
        num_draft_tokens=0,
    )
    assert request == Request(
        prompt_ids=array("I", TOKENIZER.encode("def f(x):").ids),
        sampling=SamplingParams(0.25, 3, 0.5, 0.125, 1.5, -2.0, 0.5, ((4, 0.5), (9, -100.0)), 9, (1, 2, 7)),
        stops=Stops(9, strings=("a", "b"), token_ids=frozenset({1, 2, 7})),
        output=OutputOptions(num_samples=64),
        drafting=DraftOptions(Method.BLOCK, num_tokens=0),
        seed=2**64 - 1,
    )


def test_explicit_zeros_are_not_defaults():
    request = read(temperature=0.0, seed=0, num_draft_tokens=0)
    assert (request.sampling.temperature, request.seed, request.drafting.num_tokens) == (0.0, 0, 0)


def test_a_seed_is_drawn_of_64_bits():
    seeds = {read().seed for _ in range(20)}
    assert len(seeds) == 20
    assert max(seeds) >= 2**56
    assert max(seeds) < 2**64


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (dict(token_ids={"token_ids": []}), "token_ids", "empty"),
        (dict(token_ids={"token_ids": [1, 100]}), "token_ids", "vocabulary of 100"),
        (dict(text="a"), "text", "no tokenizer"),
        (dict(max_tokens=0), "max_tokens", "at least 1"),
        (dict(temperature=-0.5), "temperature", "-0.5"),
        (dict(temperature=float("nan")), "temperature", "nan"),
        (dict(temperature=float("inf")), "temperature", "inf"),
        (dict(temperature=1e-9), "temperature", "greedy"),
        (dict(top_p=0.0), "top_p", "(0, 1]"),
        (dict(top_p=1.5), "top_p", "1.5"),
        (dict(top_p=float("nan")), "top_p", "nan"),
        (dict(min_p=-0.5), "min_p", "-0.5"),
        (dict(min_p=1.5), "min_p", "1.5"),
        (dict(repetition_penalty=0.0), "repetition_penalty", "0.01"),
        (dict(repetition_penalty=-1.0), "repetition_penalty", "-1.0"),
        (dict(repetition_penalty=11.0), "repetition_penalty", "10"),
        (dict(repetition_penalty=float("nan")), "repetition_penalty", "nan"),
        (dict(presence_penalty=2.5), "presence_penalty", "2.5"),
        (dict(presence_penalty=float("inf")), "presence_penalty", "inf"),
        (dict(frequency_penalty=-2.5), "frequency_penalty", "-2.5"),
        (dict(frequency_penalty=float("nan")), "frequency_penalty", "nan"),
        (dict(logit_bias={100: 1.0}), "logit_bias", "vocabulary of 100"),
        (dict(logit_bias={5: 101.0}), "logit_bias[5]", "101"),
        (dict(logit_bias={5: float("nan")}), "logit_bias[5]", "nan"),
        (dict(min_tokens=18), "min_tokens", "max_tokens = 17"),
        (dict(min_tokens=5, max_tokens=4), "min_tokens", "max_tokens = 4"),
        (dict(min_tokens=1, stop_token_ids=range(100)), "min_tokens", "every token"),
        (dict(n=0), "n", "1 to 64"),
        (dict(n=65), "n", "1 to 64"),
        (dict(stop=["a"]), "stop", "no tokenizer"),
        (dict(stop_token_ids=[100]), "stop_token_ids", "vocabulary"),
        (dict(stop_token_ids=[1] * 257), "stop_token_ids", "at most 256"),
        (dict(verification=9), "verification", "9"),
        (dict(num_draft_tokens=65), "num_draft_tokens", "at most 64"),
        (dict(cache_salt="é" * 129), "cache_salt", "at most 256 bytes"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(fields, field, words):
    problems = refused(**fields)
    assert list(problems) == [field]
    assert words in problems[field]


def test_a_priority_is_one_of_the_contract_s():
    assert [read(priority=number).priority for number in (0, 1, 3)] == [
        Priority.STANDARD,
        Priority.INTERACTIVE,
        Priority.BATCH,
    ]
    assert refused(priority=4) == {"priority": "unknown priority 4"}


def test_an_adapter_is_one_of_the_target_s():
    target = dataclasses.replace(TARGET, adapters=("sql", "poems"))
    assert [read(target=target, adapter=name).adapter for name in ("", "poems")] == ["", "poems"]
    assert refused(target=target, adapter="prose") == {
        "adapter": "no adapter has the name 'prose'; there are sql, poems"
    }
    assert refused(adapter="sql") == {"adapter": "no adapter has the name 'sql'; this target has none"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (dict(text=""), "text"),
        (dict(text="a", stop=[""]), "stop[0]"),
        (dict(text="a", stop=["ok", "x" * 257]), "stop[1]"),
        (dict(text="a", stop=[str(i) for i in range(17)]), "stop"),
    ],
)
def test_text_fields_are_checked(fields, field):
    assert list(refused(tokenizer=TOKENIZER, **fields)) == [field]


GRAMMARS = {"grammar": "start: /a/", "json_schema": "{}", "regex": "a", "choices": ["a"]}


ENDLESS = dataclasses.replace(TARGET, capabilities=(GRAMMAR,), eos_token_ids=())


@pytest.mark.parametrize("target", [OLDER, ENDLESS])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_target_that_cannot_end_a_grammar_is_not_asked_for_one(name, target):
    assert refused(target=target, tokenizer=TOKENIZER, **{name: GRAMMARS[name]}) == {
        name: "not supported by this target"
    }


TRANSFORMING = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {3: 1.0},
    "min_tokens": 1,
}


@pytest.mark.parametrize("name", TRANSFORMING)
def test_a_target_that_does_not_know_a_transform_is_not_asked_for_it(name):
    assert refused(target=OLDER, **{name: TRANSFORMING[name]}) == {name: "not supported by this target"}
    assert read(**{name: TRANSFORMING[name]}).sampling.changes_logits


def test_transforms_that_change_nothing_need_no_capability():
    neutral = dict(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, min_tokens=0)
    assert read(target=OLDER, **neutral).sampling == SamplingParams()


def test_a_salt_needs_a_target_that_keeps_to_it():
    assert read(cache_salt="é" * 128, target=dataclasses.replace(TARGET, capabilities=(CACHE_SALT,))).caller.cache_salt
    assert refused(cache_salt="a") == {"cache_salt": "not supported by this target"}
    assert read().caller.cache_salt == b""


def test_too_many_biases_are_refused():
    large = dataclasses.replace(TARGET, vocab_size=1000)
    assert read(target=large, logit_bias=dict.fromkeys(range(300), 1.0))
    assert list(refused(target=large, logit_bias=dict.fromkeys(range(301), 1.0))) == ["logit_bias"]


def test_every_field_of_the_contract_is_either_read_or_refused():
    """A field added to the contract must be thought of here."""
    read_here = {
        *("text", "token_ids", "chat", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n"),
        *("add_special_tokens", "truncate_prompt_tokens", "ignore_eos", "include_stop_str_in_output", "echo"),
        *("skip_special_tokens", "logprobs", "prompt_logprobs", "allowed_token_ids", "bad_words", "prediction"),
        *("return_rounds", "reasoning", "adapter", "priority"),
        *("stop", "stop_token_ids", "verification", "num_draft_tokens", "resume", "cache_salt"),
    }
    fields = {field.name for field in generation_pb2.GenerateRequest.DESCRIPTOR.fields}
    assert fields == read_here | set(GRAMMARS) | set(TRANSFORMING)


def test_a_prompt_is_required():
    assert list(refused(generation_pb2.GenerateRequest())) == ["prompt"]


def test_a_field_of_a_later_contract_is_refused_by_number():
    request = message()
    # Field 1000, a varint: 8000 << 0 as a tag, then 1.
    request.MergeFromString(b"\xc0\x3e\x01")
    problems = refused(request)
    assert "1000" in problems["field"]


def test_a_field_of_a_later_contract_is_found_in_what_a_client_received_before():
    request = message(seed=1, resume={0: {"token_ids": [1]}})
    request.resume[0].MergeFromString(b"\xc0\x3e\x01")
    assert "1000" in refused(request)["resume[0]"]


def test_of_very_many_unknown_fields_a_few_are_looked_at():
    request = message()
    request.MergeFromString(b"\xc0\x3e\x01" * 10_000)
    with pytest.raises(InvalidArgument) as caught:
        read(request)
    assert 0 < len(caught.value.violations) < 32


def test_all_problems_are_named_at_once():
    problems = refused(
        token_ids={"token_ids": [100]},
        temperature=-1.0,
        top_p=2.0,
        n=0,
        max_tokens=0,
        stop=["x"],
        stop_token_ids=[100],
        num_draft_tokens=99,
        verification=9,
        logprobs=3,
        grammar="x",
    )
    assert set(problems) == {
        *("token_ids", "temperature", "top_p", "n", "max_tokens", "stop", "stop_token_ids"),
        *("num_draft_tokens", "verification", "logprobs", "grammar"),
    }


def test_prompt_and_max_tokens_may_fill_the_context_and_not_one_more():
    assert read(max_tokens=17).stops.max_tokens == 17
    with pytest.raises(
        ContextExceeded, match=r"length is 20 tokens\. However, you requested 21 tokens \(3 in the prompt, 18 in"
    ):
        read(max_tokens=18)
    with pytest.raises(ContextExceeded):
        read(max_tokens=2**32 - 1)


@pytest.mark.parametrize("num_prompt_tokens", [20, 21, 500])
def test_a_prompt_that_leaves_no_room_is_out_of_range(num_prompt_tokens):
    with pytest.raises(ContextExceeded, match="context length is 20 tokens"):
        read(token_ids={"token_ids": [1] * num_prompt_tokens})
    assert read(token_ids={"token_ids": [1] * 19}).stops.max_tokens == 1


@pytest.mark.parametrize("method", [common_pb2.VERIFICATION_METHOD_UNSPECIFIED, common_pb2.VERIFICATION_METHOD_COUPLED])
def test_unspecified_verification_is_coupled(method):
    assert read(verification=method).drafting.method is Method.COUPLED

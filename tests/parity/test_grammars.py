"""An output follows its grammar, and is the target's own with and without speculation."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.client import Sample
from specdec.core.errors import InvalidArgument
from specdec.core.rounds import TargetOpen
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.runner.loading import grammars
from specdec.runner.model_runner import ModelRunner
from specdec.sampling.grammar import Grammars
from specdec.transport.wire import write_method
from specdec.v1 import generation_pb2
from target_service.language_model import LmVerifier
from target_service.self_draft.by_name import self_drafter
from target_service.verifier import Decision, Job
from tests.checkout import DEMO
from tests.cluster import Cluster, cluster
from tests.models.grammars import GRAMMARS, random_tree

pytestmark = pytest.mark.slow

STOP = generation_pb2.FINISH_REASON_STOP
KEYS = ("name", "age", "is_open", "tags", "next", "größe", 'a "quoted" key')


@pytest.fixture(scope="module")
def of_target(target_runner: ModelRunner) -> Grammars:
    made = grammars(DEMO / "target", target_runner.info)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def of_draft(draft_runner: ModelRunner) -> Grammars:
    made = grammars(DEMO / "draft", draft_runner.info)
    assert made is not None
    return made


@pytest.fixture
async def served(
    target_runner: ModelRunner, draft_runner: ModelRunner, of_target: Grammars, of_draft: Grammars
) -> AsyncIterator[Cluster]:
    verifier = LmVerifier(target_runner, grammars=of_target)
    async with cluster(
        [verifier], [LanguageModelDrafter(draft_runner, of_draft)], tokenizer=str(DEMO / "target")
    ) as found:
        yield found


def schema_of(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of short values."""
    kinds = ["integer", "boolean", "enum", "string", "null"] + (["array", "object"] * 2 if depth else [])
    match rng.choice(kinds):
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": rng.choice([1, 9, 120])}
        case "enum":
            return {"enum": rng.sample(["red", "green", 3, None, True, "blau ä"], rng.randint(1, 4))}
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 6)}
        case "array":
            return {"type": "array", "items": schema_of(rng, depth - 1), "maxItems": rng.randint(0, 3)}
        case "object":
            names = rng.sample(KEYS, rng.randint(0, 3))
            properties = {name: schema_of(rng, depth - 1) for name in names}
            needed = [name for name in names if rng.random() < 0.7]
            return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
        case kind:
            return {"type": kind}


async def answers(served: Cluster, **fields: Any) -> Sample:
    """With speculation, compared with the answer without."""
    both = [served.client.generate(**fields, num_draft_tokens=number) for number in (5, 0)]
    (found,), (alone,) = await asyncio.gather(*both)
    assert found.token_ids == alone.token_ids
    assert (found.text, found.finish.reason) == (alone.text, alone.finish.reason)
    return found


async def test_every_answer_that_its_grammar_ended_is_valid(served: Cluster) -> None:
    rng = random.Random(7)
    schemas = [schema_of(rng) for _ in range(60)]
    gate = asyncio.Semaphore(8)

    async def one(number: int, schema: dict[str, Any]) -> bool:
        async with gate:
            compact = {**schema, "x-guidance": {"whitespace_flexible": False}}
            how = {"temperature": float(number % 2), "seed": number, "max_tokens": 80}
            found = await answers(served, text="x = ", json_schema=json.dumps(compact), **how)
        if found.finish.reason != STOP:
            return False
        jsonschema.validate(json.loads(found.text), schema)
        return True

    ended = await asyncio.gather(*(one(*each) for each in enumerate(schemas)))
    assert sum(ended) > 50


async def test_a_schema_that_forces_keys_is_drafted(served: Cluster) -> None:
    names = ("customer_identifier", "delivery_address", "is_confirmed_by_phone")
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": list(names),
        "additionalProperties": False,
    }
    found = await answers(served, text="order = ", json_schema=json.dumps(schema), temperature=1.0, seed=4)
    assert set(json.loads(found.text)) == set(names)
    stats = found.finish.speculation
    assert len(found.token_ids) / stats.num_rounds > 1.5


async def test_what_a_grammar_forces_is_drafted_without_a_draft(
    target_runner: ModelRunner, of_target: Grammars
) -> None:
    names = ["customer_identifier", "delivery_address", "is_confirmed_by_phone", "preferred_delivery_window"]
    properties = {name: {"type": "boolean"} for name in names}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    asked = {"text": "order = ", "json_schema": json.dumps(schema | {"x-guidance": {"whitespace_flexible": False}})}
    verifier = LmVerifier(target_runner, grammars=of_target)
    async with cluster([verifier], tokenizer=str(DEMO / "target"), num_draft_tokens=None) as found:
        num_accepted = 0
        for seed in range(4):  # the first rounds measure the target
            [sample] = await found.client.generate(**asked, seed=seed, temperature=1.0)
            num_accepted += sample.finish.speculation.num_accepted_lookup_tokens
        [alone] = await found.client.generate(**asked, seed=seed, temperature=1.0, num_draft_tokens=0)
        assert sample.token_ids == alone.token_ids
        assert num_accepted, "how many rows pay is a matter of the machine"


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"regex": r"[a-f]{3}-\d\d"}, r"[a-f]{3}-\d\d"),
        ({"choices": ["yes", "no", 'say "maybe"']}, 'yes|no|say "maybe"'),
        ({"grammar": 'start: "(" item ("," item)* ")"\nitem: /[0-9]/'}, r"\(\d(,\d)*\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_regular_expressions_choices_and_lark(served: Cluster, fields: dict[str, Any], right: str) -> None:
    asked = {"text": "x = ", "temperature": 1.0, "max_tokens": 60, **fields}
    found = [await answers(served, **asked, seed=seed) for seed in range(6)]
    ended = [each.text for each in found if each.finish.reason == STOP]
    assert ended
    assert all(re.fullmatch(right, text) for text in ended)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"json_schema": '{"if": {"type": "string"}}'}, 'json_schema: Unimplemented keys: .*"if"'),
        ({"json_schema": "{"}, "json_schema: is not JSON"),
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"grammar": "start: other"}, "grammar: .*other"),
        ({"choices": ["a", ""]}, "choices: must not be empty"),
        ({"choices": ["a"], "regex": "b"}, "choices: not possible with regex"),
        ({"regex": "b", "ignore_eos": True}, "ignore_eos: not possible with regex"),
        ({"regex": "b", "min_tokens": 2}, "min_tokens: not possible with regex"),
        ({"regex": "b" * 40_000}, "regex: at most 32768 bytes, not 40000"),
    ],
    ids=str,
)
async def test_what_a_grammar_cannot_be_is_refused_by_name(served: Cluster, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        await served.client.generate(text="x", max_tokens=4, **fields)


NUMBERS = json.dumps(
    {"type": "array", "items": {"type": "integer", "maximum": 999, "minimum": 0}, "minItems": 8, "maxItems": 8}
)


async def test_an_answer_that_goes_on_elsewhere_stays_in_its_grammar(served: Cluster) -> None:
    """As after the loss of a target or an orchestrator: the output so far is part of what is opened."""
    asked: dict[str, Any] = {
        "text": "x = ",
        "json_schema": NUMBERS,
        "seed": 6,
        "temperature": 1.0,
        "max_tokens": 120,
    }
    whole = await answers(served, **asked)
    for kept in range(1, len(whole.token_ids), 5):
        [rest] = await served.client.generate(**asked, resume={0: {"token_ids": whole.token_ids[:kept]}})
        assert rest.token_ids == whole.token_ids


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
async def test_methods_that_correct_for_the_draft_follow_grammars_too(served: Cluster, method: Method) -> None:
    for seed in range(2):
        asked = {
            "text": "x = ",
            "json_schema": NUMBERS,
            "seed": seed,
            "max_tokens": 200,
            "num_draft_tokens": 4,
        }
        [found] = await served.client.generate(**asked, verification=write_method(method))
        assert len(json.loads(found.text)) == 8
        assert found.finish.speculation.num_accepted_tokens


def test_a_pass_does_not_wait_for_a_grammar_that_is_being_compiled(target_runner: ModelRunner) -> None:
    verifier = LmVerifier(target_runner, grammars=grammars(DEMO / "target", target_runner.info))
    grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(f'"{number}"' for number in range(2500)))

    def opened(grammar: str) -> Job:
        spec = SequenceSpec((5, 6, 7), 3, SamplingParams(0.0, grammar=grammar))
        return Job(TargetOpen(spec), verifier.open(spec), spec.token_ids)

    jobs = [opened(""), opened(grammar)]
    [plain, _], _ = verifier.verify(jobs)
    assert plain is not None
    started = jobs[1].state.grammar
    assert started is not None
    started.result()
    [after], _ = verifier.verify(jobs[1:])
    assert isinstance(after, Decision)
    for job in jobs:
        verifier.close(job.state)


@pytest.mark.parametrize("name", GRAMMARS)
def test_trees_of_other_lexemes_do_not_change_what_a_grammar_allows(
    target_runner: ModelRunner, of_target: Grammars, name: str
) -> None:
    verifier, mask = LmVerifier(target_runner, grammars=of_target), of_target.compiled(GRAMMARS[name]).mask()
    of_target.start(GRAMMARS[name], b"").result()
    rng = random.Random(name)
    for seed, temperature in enumerate((0.0, 1.0)):
        spec = SequenceSpec((5, 6, 7), 3, SamplingParams(temperature, grammar=GRAMMARS[name]), seed)
        alone = text_of(verifier, spec, lambda _: EMPTY_TREE)
        drafted = text_of(
            verifier, spec, lambda output, alone=alone: random_tree(rng, mask, output, alone[3 + len(output) :])
        )
        assert drafted[: len(alone)] == alone


@pytest.mark.parametrize("name", ["lookahead:4,3,4", "lookup", "recycling"])
def test_a_target_that_drafts_for_itself_stays_in_the_grammar(
    target_runner: ModelRunner, of_target: Grammars, name: str
) -> None:
    own = self_drafter(name, target_runner.info.vocab_size)
    alone, drafting = (LmVerifier(target_runner, each, of_target) for each in (None, own))
    for grammar in (GRAMMARS["closed"], GRAMMARS["strings"], GRAMMARS["numbers"]):
        of_target.start(grammar, b"").result()
        spec = SequenceSpec((5, 6, 7), 3, SamplingParams(1.0, grammar=grammar), 4)
        expected = text_of(alone, spec, lambda _: EMPTY_TREE)
        assert text_of(drafting, spec, lambda _: EMPTY_TREE, own=15)[: len(expected)] == expected


def text_of(
    verifier: LmVerifier, spec: SequenceSpec, draft: Callable[[list[int]], TokenTree], own: int = 0
) -> list[int]:
    """Thirty tokens, or fewer if the grammar is complete."""
    open_ = TargetOpen(spec, max_self_draft_nodes=own)
    state, ids = verifier.open(spec), list(spec.token_ids)
    while len(ids) < 33 and verifier.info.eos_token_ids[0] not in ids[3:]:
        tree = draft(ids[3:])
        [decision], _ = verifier.verify([Job(open_, state, ids, tree, self_draft_nodes=own)])
        assert isinstance(decision, Decision)
        tree = decision.self_draft or tree
        ids += [*(tree.token_ids[node] for node in decision.accepted), decision.next_token]
    verifier.close(state)
    return ids


async def test_samples_of_a_request_follow_the_grammar_each(served: Cluster) -> None:
    found = await served.client.generate(
        text="x = ", regex="[a-z]{4}", n=6, seed=1, temperature=1.0, num_draft_tokens=3
    )
    assert all(re.fullmatch("[a-z]{4}", sample.text) for sample in found)
    assert len({sample.text for sample in found}) > 1

"""Law: every option means the same with any draft and without one: tokens, texts and logprobs, to the last bit."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.runner.model_runner import ModelRunner
from specdec.v1 import generation_pb2
from target_service.language_model import LmVerifier
from testing.answers import over_grpc
from testing.table_model import Table, TableDrafter
from tests.checkout import DEMO
from tests.cluster import Cluster, cluster
from tests.parity.conftest import Reference

PROMPT = "def add(first, second):\n    return first + second\n\n\ndef subtract("
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logprobs": {"logprobs": 3},
    "only the token's logprobs": {"logprobs": 0},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "echo": {"echo": True},
    "stop string in the output": {"stop": ["return", "second)"], "include_stop_str_in_output": True, "logprobs": 1},
    "stop string": {"stop": ["return", "second)"], "logprobs": 1},
    "end tokens": {"ignore_eos": True, "skip_special_tokens": False, "logit_bias": {0: 12.0}},
    "stop token in the output": {"stop_token_ids": [12], "include_stop_str_in_output": True},
    "allowed tokens": {"allowed_token_ids": list(range(200, 900)), "logprobs": 2},
    "bad words": {"bad_words": ["return", "first", "second"], "logprobs": 2},
    "last tokens of the prompt": {"truncate_prompt_tokens": 5, "add_special_tokens": False},
    "samples": {"n": 3, "logprobs": 1, "prompt_logprobs": 0},
    "rounds": {"return_rounds": True},
}


@pytest.fixture(scope="module")
def drafters(draft_runner: ModelRunner) -> dict[str, Any]:
    random_one = TableDrafter(Table(vocab_size=4096))
    fingerprint = draft_runner.info.tokenizer_fingerprint
    random_one.info = dataclasses.replace(random_one.info, tokenizer_fingerprint=fingerprint, context_length=2048)
    return {"none": [], "demo": [LanguageModelDrafter(draft_runner)], "random": [random_one]}


@asynccontextmanager
async def deployment(target_runner: ModelRunner, drafters: list[Any], **settings: Any) -> AsyncIterator[Cluster]:
    tokenizer = str(DEMO / "target")
    async with cluster([LmVerifier(target_runner)], drafters, tokenizer=tokenizer, **settings) as running:
        yield running


async def answers(running: Cluster, **fields: Any) -> dict[str, Any]:
    return await over_grpc(running.client, **{"text": PROMPT, "max_tokens": 24, "seed": 11, **fields})


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, float], Any]:
    """The answers without a draft, by option and temperature."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "draft"), [(0.0, "none"), (1.0, "none"), (0.0, "demo"), (1.0, "demo"), (1.0, "random")]
)
async def test_an_option_means_the_same_with_any_draft(target_runner, drafters, alone, temperature, draft):
    async with deployment(target_runner, drafters[draft]) as running:
        every = await asyncio.gather(
            *(answers(running, temperature=temperature, **fields) for fields in OPTIONS.values())
        )
        for (option, fields), found in zip(OPTIONS.items(), every, strict=True):
            assert found == alone.setdefault((option, temperature), found), option
            for sample in found["samples"].values():
                assert len(sample["logprobs"]) == (len(sample["ids"]) if "logprobs" in fields else 0), option
        await running.settled()


@pytest.mark.slow
async def test_options_do_what_they_say(target_runner, drafters):
    async with deployment(target_runner, drafters["demo"]) as running:

        async def one(**fields: Any) -> dict[str, Any]:
            found = await answers(running, **{"temperature": 0.0, **fields})
            return found | found["samples"][0]

        plain = await one()
        stop = plain["text"][20:29]  # over several tokens, and not at their borders
        stopped = await one(stop=[stop])
        with_stop = await one(stop=[stop], include_stop_str_in_output=True)
        assert with_stop["text"] == stopped["text"] + stop == plain["text"][: len(with_stop["text"])]
        assert with_stop["ends"][-1] == len(with_stop["text"])
        assert with_stop["finish"][1] == stop
        token = plain["ids"][3]
        stopped, with_stop = [
            await one(stop_token_ids=[token], include_stop_str_in_output=included) for included in (False, True)
        ]
        assert with_stop["ids"] == [*stopped["ids"], token]
        assert plain["text"].startswith(with_stop["text"])
        assert len(with_stop["text"]) > len(stopped["text"])
        ends = await one(logit_bias={0: 100.0})
        assert (ends["ids"], ends["text"]) == ([], "")
        ignored = await one(logit_bias={0: 100.0}, ignore_eos=True)
        assert (ignored["ids"], ignored["text"]) == ([0] * 24, "")
        shown = await one(logit_bias={0: 100.0}, ignore_eos=True, skip_special_tokens=False)
        assert shown["text"] == "<|endoftext|>" * 24
        echoed = await one(echo=True)
        assert echoed["prompt_text"] == PROMPT
        assert echoed["prompt"] == list((await running.client.tokenize(text=PROMPT)).token_ids)
        assert (await one(echo=True, truncate_prompt_tokens=2))["prompt"] == echoed["prompt"][-2:]
        allowed = await one(allowed_token_ids=[5, 300, 301])
        assert set(allowed["ids"]) <= {5, 300, 301}
        first, second = plain["ids"][:2]
        words = (await running.client.detokenize([first])).strip(), await running.client.detokenize([first, second])
        without = await one(bad_words=[words[1]])
        assert without["ids"][:2] != [first, second]
        assert words[1] not in without["text"]


async def test_a_prediction_is_a_source_of_draft_tokens_and_changes_nothing_else(target_runner):
    async with deployment(target_runner, [], num_draft_tokens=None) as running:
        request = dict(text=PROMPT, max_tokens=48, temperature=0.0, seed=1)
        [plain] = await running.client.generate(**request)
        for prediction, most_right in ((plain.text, 1.0), ("x = 1\n" * 20, 0.3)):
            [found] = await running.client.generate(prediction=prediction, **request)
            assert found.token_ids == plain.token_ids
            looked_up = found.finish.speculation
            if most_right == 1.0:
                assert looked_up.num_accepted_lookup_tokens > 8
                assert looked_up.num_accepted_lookup_tokens >= 0.8 * looked_up.num_lookup_tokens
                assert found.origins.count(generation_pb2.TOKEN_ORIGIN_LOOKUP) == looked_up.num_accepted_lookup_tokens


async def test_reports_of_rounds_add_up_to_the_statistics(target_runner, drafters):
    async with deployment(target_runner, drafters["demo"]) as running:
        reports, finish = [], None
        request = dict(text=PROMPT, max_tokens=24, temperature=0.0, seed=1, return_rounds=True)
        async for response in running.client.stream(**request):
            if response.HasField("round"):
                reports.append(response.round)
            elif response.HasField("chunk") and response.chunk.HasField("finish"):
                finish = response.chunk.finish
        assert [report.round for report in reports] == list(range(len(reports)))
        assert len(reports) == finish.speculation.num_rounds
        assert sum(report.num_draft_tokens for report in reports) == finish.speculation.num_draft_tokens
        assert sum(report.num_accepted_tokens for report in reports) == finish.speculation.num_accepted_tokens
        assert {report.source for report in reports} == {
            generation_pb2.TOKEN_ORIGIN_UNSPECIFIED,
            generation_pb2.TOKEN_ORIGIN_DRAFT,
        }
        assert all(report.pass_us > 0 for report in reports)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_logprobs_are_those_of_transformers(target_runner, drafters, reference: Reference, temperature, device):
    async with deployment(target_runner, drafters["demo"]) as running:
        found = await answers(running, temperature=temperature, logprobs=4, prompt_logprobs=4)
    text = found["prompt"] + found["samples"][0]["ids"]
    told = found["prompt_logprobs"] + found["samples"][0]["logprobs"]
    assert len(told) == len(text) - 1
    with torch.inference_mode():
        logits = reference.model(torch.tensor([text], device=reference.model.device)).logits[0].float().cpu()
    expected = logits.log_softmax(-1)
    for position, (logprob, *top) in enumerate(told):
        row = expected[position]
        assert logprob == pytest.approx(float(row[text[position + 1]]), abs=1e-4)
        assert [value for _, value in top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
        assert dict(top).get(text[position + 1], logprob) == logprob, "the same float"


async def test_a_prompts_logprobs_are_those_that_its_tokens_have_when_they_are_generated(target_runner, drafters):
    async with deployment(target_runner, drafters["demo"]) as running:
        first = await answers(running, temperature=0.0, logprobs=2, prompt_logprobs=2)
        text = first["prompt"] + first["samples"][0]["ids"]
        ids = {"text": None, "token_ids": {"token_ids": text}}
        second = await answers(running, temperature=0.0, prompt_logprobs=2, **ids)
        assert second["prompt_logprobs"] == first["prompt_logprobs"] + first["samples"][0]["logprobs"]
        again = await running.client.generate(token_ids={"token_ids": text}, max_tokens=1)
        assert again[0].finish.usage.cached_prompt_tokens > 0


@pytest.mark.parametrize("finished", [(), (0,), (1,), (0, 1)])
async def test_a_prompts_logprobs_are_sent_again_whatever_samples_a_resumed_request_has_finished(
    target_runner, finished: tuple[int, ...]
):
    fields = {"prompt_logprobs": 2, "n": 2, "max_tokens": 8}
    async with deployment(target_runner, []) as running:
        whole = await answers(running, **fields)
        samples = whole["samples"]
        received = {index: samples[index]["ids"][: 8 if index in finished else 3] for index in samples}
        again = await answers(running, **fields, resume={index: {"token_ids": ids} for index, ids in received.items()})
        await running.settled()
    assert again["prompt_logprobs"] == whole["prompt_logprobs"] != []
    assert {index: ids + again["samples"][index]["ids"] for index, ids in received.items()} == {
        index: sample["ids"] for index, sample in samples.items()
    }
    assert [sample["finish"] for sample in again["samples"].values()] == [
        sample["finish"] for sample in samples.values()
    ]


async def test_a_long_prompts_logprobs_come_in_parts_and_are_the_same(target_runner):
    ids = [1 + (7 * place) % 4000 for place in range(700)]
    async with deployment(target_runner, []) as running:
        found = [
            await answers(running, text=None, token_ids={"token_ids": ids}, prompt_logprobs=most, max_tokens=2)
            for most in (20, 0)
        ]
    assert len(found[0]["prompt_logprobs"]) == len(found[1]["prompt_logprobs"]) == 699
    assert [each[0] for each in found[0]["prompt_logprobs"]] == [each[0] for each in found[1]["prompt_logprobs"]]
    assert {len(each) for each in found[0]["prompt_logprobs"]} == {21}

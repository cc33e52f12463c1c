"""Completions over HTTP: the same text as over gRPC, in OpenAI's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import MODEL, Running, serving

BODY: dict[str, Any] = {"model": MODEL, "prompt": "def f(", "max_tokens": 24, "seed": 3}


async def events(running: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it should."""
    async with running.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_completion_is_the_text_that_grpc_gives():
    async with serving() as running:
        [expected] = await running.cluster.client.generate(text="def f(", max_tokens=24, seed=3)
        response = await running.http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "mine"
        answer = response.json()
        [choice] = answer["choices"]
        assert answer["id"] == "cmpl-mine"
        assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
        assert (choice["text"], choice["index"], choice["finish_reason"]) == (expected.text, 0, "length")
        assert choice["logprobs"] is None
        usage = answer["usage"]
        assert usage["completion_tokens"] == 24
        assert usage["total_tokens"] == usage["prompt_tokens"] + 24
        streamed = await events(running, "/v1/completions", {**BODY, "stream": True})
        assert "".join(event["choices"][0]["text"] for event in streamed) == expected.text
        reasons = [event["choices"][0]["finish_reason"] for event in streamed]
        assert reasons[-1] == "length"
        assert not any(reasons[:-1])
        await running.cluster.settled()


async def test_several_prompts_and_samples_have_an_index_each():
    async with serving() as running:
        body = {**BODY, "prompt": ["a", "b b"], "n": 3, "max_tokens": 5}
        answer = (await running.http.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        for prompt, text in enumerate(body["prompt"]):
            expected = await running.cluster.client.generate(text=text, max_tokens=5, seed=3, n=3)
            texts = [choice["text"] for choice in answer["choices"][3 * prompt : 3 * prompt + 3]]
            assert texts == [sample.text for sample in expected]
        assert answer["usage"]["completion_tokens"] == 30
        streamed: dict[int, str] = {}
        for event in await events(running, "/v1/completions", {**body, "stream": True}):
            [choice] = event["choices"]
            streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
        assert streamed == {choice["index"]: choice["text"] for choice in answer["choices"]}


async def test_usage_comes_last_or_with_every_chunk():
    async with serving() as running:
        body = {**BODY, "stream": True, "stream_options": {"include_usage": True}, "num_draft_tokens": 4}
        streamed = await events(running, "/v1/completions", body)
        assert streamed[-1]["choices"] == []
        assert streamed[-1]["usage"]["completion_tokens"] == 24
        assert all(event["usage"] is None for event in streamed[:-1])
        metrics = streamed[-1]["metrics"]["speculative_decoding"]
        assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"] > 0
        accepted = sum(place * count for place, count in enumerate(metrics["acceptance_histogram"]))
        assert accepted == metrics["num_accepted_draft_tokens"]
        assert len(metrics["acceptance_histogram"]) == metrics["num_spec_tokens"] + 1 == 5
        body["stream_options"] = {"continuous_usage_stats": True}
        counts = [event["usage"]["completion_tokens"] for event in await events(running, "/v1/completions", body)]
        assert counts == sorted(counts)
        assert counts[-1] == 24
        alone = (await running.http.post("/v1/completions", json={**BODY, "num_draft_tokens": 0})).json()
        assert "metrics" not in alone


async def test_logprobs_as_evaluations_read_them():
    """The prompt's tokens with their logprobs, and whether each is the likeliest: the same float in both places."""
    async with serving() as running:
        ids = list((await running.cluster.client.tokenize(text="def f(x): return x")).token_ids)
        body = {"prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
        [choice] = (await running.http.post("/v1/completions", json=body)).json()["choices"]
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + 1 == len(logprobs["text_offset"])
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
        assert choice["text"].startswith("def f(x): return x")
        for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if "\ufffd" not in token:
                assert choice["text"][start:].startswith(token)
        alone = (await running.http.post("/v1/completions", json={**body, "max_tokens": 0})).json()
        [prompt_alone] = alone["choices"]
        assert prompt_alone["text"] == "def f(x): return x"
        assert prompt_alone["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:-1]
        assert alone["usage"]["completion_tokens"] == 0
        streamed = [e["choices"][0] for e in await events(running, "/v1/completions", {**body, "stream": True})]
        joined = [value for event in streamed for value in event["logprobs"]["token_logprobs"]]
        assert joined == logprobs["token_logprobs"]
        as_ids = (await running.http.post("/v1/completions", json={**body, "return_tokens_as_token_ids": True})).json()
        assert as_ids["choices"][0]["logprobs"]["tokens"][:-1] == [f"token_id:{token_id}" for token_id in ids]


STREAMED = {"stream": True, "prompt_logprobs": None}


@pytest.mark.slow
@pytest.mark.parametrize("num_draft_tokens", [0, 5])
async def test_offsets_are_the_same_however_the_answer_is_cut(num_draft_tokens):
    """A stop string cuts a token: what is left of it is text without a token, in a chunk of several tokens."""
    async with serving() as running:
        body = {**BODY, "logprobs": 0, "num_draft_tokens": num_draft_tokens}
        [whole] = (await running.http.post("/v1/completions", json=body)).json()["choices"]
        for echo in (False, True):
            offsets, before = whole["logprobs"]["text_offset"], len(BODY["prompt"]) if echo else 0
            for at in range(len(whole["text"]) - 1):
                stop = whole["text"][at : at + 2]
                answer = (await running.http.post("/v1/completions", json={**body, "stop": stop, "echo": echo})).json()
                [choice] = answer["choices"]
                text = whole["text"][: whole["text"].index(stop)]
                assert choice["text"][before:] == text
                found_offsets = [offset - before for offset in choice["logprobs"]["text_offset"] if offset >= before]
                assert found_offsets == offsets[: len(found_offsets)]
                assert not found_offsets or found_offsets[-1] <= len(text)


async def test_what_a_prompt_and_tokens_were_can_be_had():
    async with serving() as running:
        body = {**BODY, "return_token_ids": True, "prompt_logprobs": 2, "return_origins": True, "num_draft_tokens": 3}
        answer = (await running.http.post("/v1/completions", json=body)).json()
        [choice] = answer["choices"]
        assert choice["prompt_token_ids"] == list((await running.cluster.client.tokenize(text="def f(")).token_ids)
        assert len(choice["token_ids"]) == len(choice["specdec"]["origins"]) == 24
        assert set(choice["specdec"]["origins"]) <= {"draft", "correction", "bonus"}
        assert "draft" in choice["specdec"]["origins"]
        rounds = choice["specdec"]["rounds"]
        assert [report["round"] for report in rounds] == list(range(len(rounds)))
        assert sum(report["num_accepted_tokens"] + 1 for report in rounds) >= 24
        assert {report["source"] for report in rounds if report["num_draft_tokens"]} == {"draft"}
        streamed = [e["choices"][0] for e in await events(running, "/v1/completions", body | STREAMED)]
        assert [event["prompt_token_ids"] for event in streamed if "prompt_token_ids" in event] == [
            choice["prompt_token_ids"]
        ]
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "n": 2, "return_token_ids": True}
        chat = (await running.http.post("/v1/chat/completions", json=asked)).json()
        chunks = await events(running, "/v1/chat/completions", {**asked, "stream": True})
        of_chat = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
        assert of_chat == [chat["prompt_token_ids"]] * 2
        joined = [report for event in streamed for report in event["specdec"]["rounds"]]
        assert [report["base"] for report in joined] == [report["base"] for report in rounds]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert len(others) == len(choice["prompt_token_ids"]) - 1
        assert all(
            str(token_id) in entry for token_id, entry in zip(choice["prompt_token_ids"][1:], others, strict=True)
        )


@pytest.mark.parametrize(
    ("fields", "same_as"),
    [
        ({"seed": -1}, {"seed": (1 << 64) - 1}),
        ({"top_k": -1}, {}),
        ({"temperature": 1e-6}, {"temperature": 0.0}),
        ({"stop": None, "user": "me", "metadata": {"a": "b"}, "store": False}, {}),
    ],
)
async def test_values_of_other_servers_mean_what_they_mean_there(fields, same_as):
    async with serving() as running:
        given = {"text": "def f(", "max_tokens": 24, "seed": 3, **same_as}
        [expected] = await running.cluster.client.generate(**given)
        answer = (await running.http.post("/v1/completions", json={**BODY, **fields})).json()
        assert answer["choices"][0]["text"] == expected.text


async def test_a_stop_string_is_told():
    async with serving() as running:
        whole = (await running.http.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        stop = whole[10:14]
        [choice] = (await running.http.post("/v1/completions", json={**BODY, "stop": stop})).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
        assert choice["stop_reason"] == stop


async def test_what_ends_an_answer_is_counted_and_only_what_the_caller_named_is_its_reason():
    async with serving(ends=tuple(range(0, 4096, 16))) as running:

        async def ask(**fields: Any) -> tuple[list[int], int, Any]:
            body = {**BODY, "max_tokens": 200, "return_token_ids": True, **fields}
            answer = (await running.http.post("/v1/completions", json=body)).json()
            streamed = await events(
                running, "/v1/completions", {**body, **STREAMED, "stream_options": {"include_usage": True}}
            )
            [choice] = answer["choices"]
            assert choice["finish_reason"] == "stop"
            assert streamed[-1]["usage"] == answer["usage"]
            assert [event["choices"][0]["stop_reason"] for event in streamed[-2:-1]] == [choice["stop_reason"]]
            return choice["token_ids"], answer["usage"]["completion_tokens"], choice["stop_reason"]

        ids, count, reason = await ask()
        assert (count, reason) == (len(ids) + 1, None), "the model's end token"
        assert await ask(stop_token_ids=ids[-1:]) == (ids[: ids.index(ids[-1])], ids.index(ids[-1]) + 1, ids[-1])
        shorter, count, reason = await ask(include_stop_str_in_output=True)
        assert (shorter[:-1], count, reason) == (ids, len(ids) + 1, None)

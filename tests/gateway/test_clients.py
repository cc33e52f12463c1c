"""Clients that people use: the official one, unchanged, and a check of bodies against OpenAI's own schema."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.server import GatewayServer
from gateway.settings import GatewaySettings
from orchestrator.replicas.poison import MAX_HARM
from specdec.telemetry.prometheus import Scrape
from testing.table_model import TableVerifier
from tests.checkout import DEMO
from tests.cluster import cluster
from tests.gateway.conftest import MODEL, models, serving

# The client looks at its machine by other programs.
pytestmark = pytest.mark.slow

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 2?"}]},
]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "seed": 5}


def client(url: str, **fields: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", **fields)


async def test_the_official_client_chats():
    async with serving() as running, client(running.url) as openai_client:
        grpc = running.cluster.client
        texts = {"system": "Be short.", "user": "What is\n2 + 2?"}
        chat = {"messages": [{"role": role, "content": text} for role, text in texts.items()]}
        [expected] = await grpc.generate(chat=chat, max_tokens=16, seed=5)
        completion = await openai_client.chat.completions.create(**CHAT)
        assert completion.choices[0].message.content == expected.text
        assert completion.choices[0].finish_reason == "length"
        assert completion.usage.completion_tokens == 16
        assert completion.usage.prompt_tokens == expected.finish.usage.prompt_tokens
        chunks = [
            chunk
            async for chunk in await openai_client.chat.completions.create(
                **CHAT, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
        assert chunks[-1].usage == completion.usage
        reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
        assert reasons.count("length") == 1
        assert reasons[-1] == "length"
        stop = expected.text[6:10]  # what ends by length, the helper refuses
        async with openai_client.chat.completions.stream(**CHAT, stop=stop) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == expected.text[: expected.text.index(stop)]
        raw = await openai_client.chat.completions.with_raw_response.create(
            **CHAT, extra_headers={"x-request-id": "mine"}
        )
        assert raw.headers["x-request-id"] == "mine"
        assert raw.parse().id == "chatcmpl-mine"
        assert [model.id async for model in openai_client.models.list()] == [MODEL]


async def test_logprobs_in_chat_have_the_tokens_bytes():
    async with serving() as running, client(running.url) as openai_client:
        completion = await openai_client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
        [choice] = completion.choices
        tokens = choice.logprobs.content
        assert len(tokens) == 16
        text = b"".join(bytes(token.bytes) for token in tokens).decode("utf-8", "replace")
        assert text.startswith(choice.message.content.rstrip("\ufffd"))
        assert all(len(token.top_logprobs) == 3 for token in tokens)
        assert all(token.logprob <= token.top_logprobs[0].logprob for token in tokens)
        streamed = await openai_client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in streamed]
        assert [token for part in parts if part for token in part.content] == tokens
        extra = {"prediction": {"type": "content", "content": choice.message.content}}
        predicted = await openai_client.chat.completions.create(**CHAT, extra_body=extra)
        assert predicted.choices[0].message.content == choice.message.content
        assert predicted.usage.completion_tokens_details.accepted_prediction_tokens >= 0


async def test_an_answer_can_be_sent_back_as_its_class_writes_it():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    async with serving() as running, client(running.url) as openai_client:
        completion = await openai_client.chat.completions.create(**CHAT)
        for fields in ({}, {"content": None, "tool_calls": [call]}):
            message = completion.choices[0].message.model_copy()
            answer = type(message).model_validate(message.model_dump() | fields).model_dump()
            assert answer.keys() >= {"audio", "function_call", "refusal"}
            await openai_client.chat.completions.create(**{**CHAT, "messages": [*MESSAGES, answer, MESSAGES[1]]})
        for name in ("audio", "function_call", "refusal"):
            with pytest.raises(openai.BadRequestError, match=name):
                await openai_client.chat.completions.create(**{**CHAT, "messages": [{**answer, name: "a"}]})


async def test_errors_are_the_clients_own():
    async with serving() as running, client(running.url, max_retries=0) as openai_client:
        create = openai_client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**{**CHAT, "temperature": -1})
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await create(**{**CHAT, "model": "gpt-4"})
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**{**CHAT, "max_tokens": 10**6})
        assert caught.value.code == "context_length_exceeded"


async def test_a_full_server_is_tried_again():
    async with (
        serving(pass_s=0.01, max_live_sequences=1, max_waiting_requests=0) as running,
        client(running.url, max_retries=0) as once,
        client(running.url, max_retries=20) as often,
    ):
        stream = await once.completions.create(model=MODEL, prompt="a", max_tokens=3000, stream=True)
        await anext(aiter(stream))
        with pytest.raises(openai.RateLimitError):
            await once.chat.completions.create(**CHAT)
        trying = asyncio.create_task(often.chat.completions.create(**CHAT))
        await asyncio.sleep(0.2)
        await stream.close()
        assert (await trying).choices[0].finish_reason == "length"


def test_the_client_without_asyncio(running_in_a_thread: str):
    with openai.OpenAI(base_url=f"{running_in_a_thread}/v1", api_key="any") as openai_client:
        completion = openai_client.chat.completions.create(**CHAT)
        chunks = openai_client.chat.completions.create(**CHAT, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == completion.choices[0].message.content
        completion = openai_client.completions.create(model=MODEL, prompt="a", max_tokens=4, echo=True, logprobs=2)
        assert completion.choices[0].text.startswith("a")


def test_bodies_follow_openais_schema(running_in_a_thread: str):
    """Of the cases of llm-comply, those for what is served here: not tools, pictures and a summary of thoughts."""
    command = [str(Path(sys.executable).parent / "llm-comply"), "--format", "openai-chat", "--timeout", "30"]
    flags = ["-u", f"{running_in_a_thread}/v1", "-k", "any", "-m", MODEL]
    run = subprocess.run([*command, *flags], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    passed = {line.split("(")[0].strip(" \u2713") for line in run.stdout.splitlines() if "\u2713" in line}
    wanted = {"Basic Text Response", "System Prompt", "Multi-turn Conversation"}
    assert passed >= wanted | {"Streaming Response", "Streaming Usage"}, run.stdout


async def test_a_stream_survives_the_loss_of_its_orchestrator():
    async with AsyncExitStack() as stack:
        verifier, drafter = models(pass_s=0.005)
        settings = {"tokenizer": str(DEMO / "target")}
        one = await stack.enter_async_context(cluster([verifier], [drafter], **settings))
        other = await stack.enter_async_context(cluster([models()[0]], [], **settings))
        addresses = [f"127.0.0.1:{each.orchestrator.port}" for each in (one, other)]
        server = GatewayServer(GatewaySettings(orchestrator=addresses), Scrape())
        await server.start()
        stack.push_async_callback(server.stop)
        openai_client = await stack.enter_async_context(client(f"http://127.0.0.1:{server.port}"))
        request = {**CHAT, "max_tokens": 400}
        [expected] = (await openai_client.chat.completions.create(**request)).choices
        text, killed = "", False
        async for chunk in await openai_client.chat.completions.create(**request, stream=True, logprobs=True):
            text += chunk.choices[0].delta.content or ""
            if len(text) > 40 and not killed:
                killed = True
                await one.orchestrator.stop(0.0)
        assert killed
        assert text == expected.message.content


async def test_a_request_under_which_targets_fail_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_passes = 0

    def fail(*_: Any) -> None:
        nonlocal num_passes
        num_passes += 1
        raise RuntimeError("planted")

    keys = tmp_path / "keys.jsonl"
    keys.write_text(json.dumps({"name": "me", "sha256": hashlib.sha256(b"secret").hexdigest()}))
    async with serving(api_keys_file=str(keys)) as running:
        monkeypatch.setattr(TableVerifier, "verify", fail)
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="secret") as asking:
            with pytest.raises(openai.InternalServerError, match="it is not tried again") as refused:
                await asking.completions.create(model=MODEL, prompt="a", max_tokens=4)
        assert refused.value.status_code == 503
        assert "retry-after" not in refused.value.response.headers
        assert num_passes == MAX_HARM, "OpenAI's client repeats other answers of 503"

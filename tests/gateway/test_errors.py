"""What is wrong is told in OpenAI's shape, with the right status, and before anything is streamed."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from typing import Any

from starlette.requests import Request

from gateway.answers import Answer
from tests.gateway.conftest import MODEL, serving, with_keys

COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 4}
HALF = "\ud800"  # of a surrogate pair
OTHER = {"type": "function", "function": {"name": "other"}}
JSON = {"response_format": {"type": "json_object"}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "now"}}]}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}


def with_definitions(name: str, value: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "now", "parameters": {"type": "object", name: value}}}


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


BAD: list[tuple[str, dict[str, Any], str | None]] = [
    ("completions", {"max_tokens": 4}, "prompt"),
    ("completions", {**COMPLETION, "prompt": []}, "prompt"),
    ("completions", {**COMPLETION, "prompt": [[]]}, "prompt"),
    ("completions", {**COMPLETION, "prompt": [[1], []]}, "prompt"),
    ("completions", {**COMPLETION, "prompt": ""}, "prompt"),
    ("completions", {**COMPLETION, "prompt": [[99999]]}, "prompt"),
    ("completions", {**COMPLETION, "prompt": {"a": 1}}, "prompt"),
    ("completions", {**COMPLETION, "prompt": HALF}, None),
    ("completions", {**COMPLETION, "max_tokens": 0}, "max_tokens"),
    ("completions", {**COMPLETION, "max_tokens": -1}, "max_tokens"),
    ("completions", {**COMPLETION, "max_tokens": "4"}, "max_tokens"),
    ("completions", {**COMPLETION, "logprobs": 21}, "logprobs"),
    ("completions", {**COMPLETION, "best_of": 2}, "best_of"),
    ("completions", {**COMPLETION, "suffix": "b"}, "suffix"),
    ("completions", {**COMPLETION, "temperature": -1}, "temperature"),
    ("completions", {**COMPLETION, "temperature": 1e999}, None),
    ("completions", {**COMPLETION, "n": 0}, "n"),
    ("completions", {**COMPLETION, "stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {**COMPLETION, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    *(("completions", {**COMPLETION, "logit_bias": {key: 1}}, "logit_bias") for key in ("a", "", "-1", "9" * 99)),
    ("completions", {**COMPLETION, "logit_bias": {"7": 1000}}, "logit_bias[7]"),
    ("completions", {**COMPLETION, "stop": ["a"] * 17}, "stop"),
    ("completions", {**COMPLETION, "stop": [1]}, "stop[0]"),
    ("completions", {**COMPLETION, "guided_json": {}}, "guided_json"),
    *(("completions", {**COMPLETION, name: 1}, name) for name in ("no_such_field", "top-k", "str", "1", " ")),
    *(("completions", {**COMPLETION, "request_id": value}, "request_id") for value in ("", "é", "a b", "a" * 129)),
    ("completions", {**COMPLETION, "verification": "magic"}, "verification"),
    *(("completions", {**COMPLETION, "priority": value}, "priority") for value in ("urgent", 1 << 63)),
    ("chat/completions", {"max_tokens": 4}, "messages"),
    ("chat/completions", {**CHAT, "messages": []}, "messages"),
    ("chat/completions", {**CHAT, "messages": [{"role": "pirate", "content": "a"}]}, "messages[0].role"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {**CHAT, **JSON}, "response_format"),  # no table model can
    ("chat/completions", {**CHAT, **TOOLS, "tool_choice": "required"}, "tools"),
    ("chat/completions", {**CHAT, "structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
    ("completions", {**COMPLETION, "structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ("completions", {**COMPLETION, "structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar"),
    ("chat/completions", {**CHAT, "max_tokens": 5, "max_completion_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ("chat/completions", {**CHAT, "messages": [called("", "{}")]}, "messages[0].tool_calls[0].function.name"),
    ("chat/completions", {**CHAT, "tools": [tool({"a": HALF})]}, None),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
    ("chat/completions", {**CHAT, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_mes"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, "response_format"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {**CHAT, **JSON, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("chat/completions", {**CHAT, **JSON, **TOOLS, "tool_choice": "required"}, "tool_choice"),
    *(
        ("completions", {**COMPLETION, "structured_outputs": outputs}, "structured_outputs")
        for outputs in (
            {"json": {}, "json_object": True},
            {},
            {"regex": None},
            {"choice": []},
            {"choice": ["a"], "regex": "a"},
        )
    ),
    ("completions", {**COMPLETION, "allowed_token_ids": []}, "allowed_token_ids"),
    ("chat/completions", {**CHAT, **TOOLS, "tool_choice": OTHER}, "tool_choice"),
    ("chat/completions", {**CHAT, "chat_template": "x"}, "chat_template"),
    *(
        ("chat/completions", {**CHAT, "tools": [with_definitions(name, value)], "tool_choice": "required"}, "tools[0].")
        for name in ("$defs", "definitions")
        for value in ([], [1], "a", 1, True, None)
    ),
    (
        "chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
]


def is_an_error(body: dict[str, Any]) -> bool:
    error = body["error"]
    return set(error) == {"message", "type", "param", "code"} and bool(error["message"])


async def test_a_bad_value_is_refused_by_the_name_of_its_field():
    async with serving() as running:
        for path, body, param in BAD:
            for stream in (False, True) if "stream" not in body and "stream_options" not in body else (None,):
                sent = body if stream is None else {**body, "stream": stream}
                data = json.dumps(sent)
                response = await running.http.post(f"/v1/{path}", content=data)
                assert response.status_code == 400, (sent, response.text)
                assert is_an_error(response.json())
                named = response.json()["error"]["param"]
                assert param is None or (named or "").startswith(param), (sent, response.text)
        assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_body_that_is_no_object_is_refused():
    async with serving() as running:
        for content in (b"", b"{", b"[1]", b"null", b"[" * 10_000, b"\xff\xfe", b'{"prompt": NaN}'):
            response = await running.http.post("/v1/completions", content=content)
            assert response.status_code == 400, content[:20]
            assert is_an_error(response.json())


async def test_depth_is_no_defect_of_the_server():
    async with serving() as running:
        for depth in (50, 190, 300, 975, 5_000):
            schema = '{"items":' * depth + "{}" + "}" * depth
            tools = f'[{{"type": "function", "function": {{"name": "now", "parameters": {schema}}}}}]'
            forms = (
                f'"structured_outputs": {{"json": {schema}}}',
                f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}',
                f'"tools": {tools}, "tool_choice": "required"',
                f'"chat_template_kwargs": {schema}',
            )
            for form in forms:
                for size in (0, 300_000):  # a large body is read by a thread, with another stack
                    fields = f'"max_tokens": 1, "user": "{"a" * size}", {form}'
                    body = f'{{"messages": [{{"role": "user", "content": "a"}}], {fields}}}'
                    response = await running.http.post("/v1/chat/completions", content=body)
                    assert response.status_code in (200, 400), (depth, size, form[:20], response.text)


async def test_names_in_an_error_are_those_of_the_caller():
    async with serving() as running:
        body = {**COMPLETION, "structured_outputs": {"regex": "a"}, "ignore_eos": True}
        response = await running.http.post("/v1/completions", json=body)
        assert "ignore_eos: not possible with structured_outputs.regex" in response.json()["error"]["message"]
        response = await running.http.post("/detokenize", json={"tokens": [1] * (1 << 20 | 1)})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")
        response = await running.http.post("/tokenize", json={"prompt": ""})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_what_the_gateway_does_not_expect_ends_a_stream_with_an_error(monkeypatch, caplog):
    def broken(answer: Answer, prompt: int, response: Any) -> Any:
        if response.HasField("chunk"):
            raise ValueError("a secret")
        yield {"choices": []}

    monkeypatch.setattr(Answer, "chunks", broken)
    async with serving() as running:
        response = await running.http.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 500
        streamed = await running.http.post("/v1/completions", json={**COMPLETION, "stream": True})
        *_, last = streamed.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: ")) == response.json()
        assert is_an_error(response.json())
        assert "secret" not in response.text
        assert caplog.text.count("ValueError: a secret") == 2


async def test_statuses_and_headers_are_those_that_clients_expect():
    async with serving() as running:
        post = running.http.post
        too_long = await post("/v1/completions", json={**COMPLETION, "max_tokens": 10**6})
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
        unknown = await post("/v1/completions", json={**COMPLETION, "model": "gpt-4"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert unknown.json()["error"]["param"] == "model"
        for path in ("/v1/embeddings", "/none", "/v1/models/none", "/playground/none.js"):
            missing = await running.http.get(path)
            assert missing.status_code == 404
            assert is_an_error(missing.json())
        wrong = await running.http.get("/v1/completions")
        assert wrong.status_code == 405
        assert is_an_error(wrong.json())
        large = await post("/v1/completions", content=b" " * ((1 << 22) + 1))
        assert large.status_code == 413
        port = running.gateway.port
        for host in ("evil.example", f"evil.example:{port}", "", "localhost.evil.example", "evil@localhost", "[::1"):
            foreign = await running.http.get("/v1/models", headers={"host": host})
            assert foreign.status_code == 400
            assert is_an_error(foreign.json())
        for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", "[::1]"):
            assert (await running.http.get("/v1/models", headers={"host": host})).status_code == 200


async def test_a_full_server_says_when_to_come_again():
    async with serving(pass_s=0.01, max_live_sequences=1, max_waiting_requests=0) as running:
        long = {**COMPLETION, "max_tokens": 3000, "stream": True}
        async with running.http.stream("POST", "/v1/completions", json=long) as busy:
            assert busy.status_code == 200
            refused = await running.http.post("/v1/completions", json=COMPLETION)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
            assert int(refused.headers["retry-after-ms"]) >= 1
        await running.cluster.settled()


async def test_nothing_is_kept_of_requests_without_a_target() -> None:
    async with serving() as running:
        await running.cluster.targets[0].stop()
        while (refused := await running.http.get("/v1/models")).status_code != 503:
            await asyncio.sleep(0.01)
        assert refused.json()["error"]["message"] == "no target is ready"
        assert int(refused.headers["retry-after"]) == 1
        gc.collect()
        assert not [value for value in gc.get_objects() if type(value) is Request]


async def test_a_timeout_is_not_tried_again():
    async with serving(pass_s=0.05, gateway={"request_timeout_s": 0.5}) as running:
        response = await running.http.post("/v1/completions", json={**COMPLETION, "max_tokens": 3000})
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
        async with running.http.stream(
            "POST", "/v1/completions", json={**COMPLETION, "max_tokens": 3000, "stream": True}
        ) as streamed:
            assert streamed.status_code == 200
            lines = [line async for line in streamed.aiter_lines() if line]
        assert lines[-1] != "data: [DONE]"
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        await running.cluster.settled()


async def test_keys_are_passed_on(tmp_path):
    async with serving(**with_keys(tmp_path)) as running:
        for method, path, body in (
            ("POST", "/v1/completions", COMPLETION),
            ("POST", "/v1/chat/completions", CHAT),
            ("GET", "/v1/models", None),
            ("POST", "/tokenize", {"prompt": "a"}),
            ("POST", "/detokenize", {"tokens": [5]}),
            ("GET", "/tokenizer_info", None),
        ):
            for key, status in (("secret", 200), ("wrong", 401), ("", 401)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                response = await running.http.request(method, path, json=body, headers=headers)
                assert response.status_code == status, (path, key, response.text)
                if status == 401:
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await running.http.get("/health")).status_code == 200


async def test_a_client_that_leaves_frees_its_sequences():
    async with serving(pass_s=0.01) as running:
        long = {**COMPLETION, "max_tokens": 5000}
        async with running.http.stream("POST", "/v1/completions", json={**long, "stream": True}) as response:
            await anext(response.aiter_lines())
        await running.cluster.settled(5.0)
        asking = asyncio.create_task(running.http.post("/v1/completions", json=long))
        while not running.cluster.orchestrator.live_sequences:
            await asyncio.sleep(0.01)
        asking.cancel()
        await running.cluster.settled(5.0)


async def test_what_the_server_is_can_be_asked():
    async with serving() as running:
        get = running.http.get
        [model] = (await get("/v1/models")).json()["data"]
        assert (model["id"], model["object"]) == (MODEL, "model")
        assert (await get(f"/v1/models/{MODEL}")).json() == model
        assert (await get("/version")).json()["version"]
        assert (await get("/ping")).status_code == 200
        assert (await get("/load")).json() == {"server_load": 0}
        tokenizer = (await get("/tokenizer_info")).json()
        assert tokenizer["eos_token"] == "<|endoftext|>"
        assert "messages" in tokenizer["chat_template"]
        tokens = (await running.http.post("/tokenize", json={"prompt": "def f(", "return_token_strs": True})).json()
        assert tokens["count"] == len(tokens["tokens"])
        assert "".join(tokens["token_strs"]) == "def f("
        back = (await running.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        assert back == {"prompt": "def f("}
        chat = (await running.http.post("/tokenize", json={"messages": CHAT["messages"]})).json()
        assert chat["count"] > 3


async def test_the_page_is_at_each_of_its_addresses():
    async with serving() as running:
        pages = [await running.http.get(path, follow_redirects=True) for path in ("/", "/playground", "/playground/")]
        assert {(page.status_code, page.text) for page in pages} == {(200, pages[0].text)}
        for page in pages:
            for asset in re.findall(r'(?:src|href)="(playground/[^"]+)"', page.text):
                assert (await running.http.get(str(page.url.join(asset)))).status_code == 200

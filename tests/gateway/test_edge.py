"""Between a client and the API: proxies, tunnels and browsers, names, idle connections, and the end of a server."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx2 as httpx
import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from gateway import sse, translation
from gateway.bodies import ChatBody, CompletionBody
from gateway.errors import Json, http_error
from gateway.responses_body import ResponsesBody, chat_of
from gateway.server import GatewayServer
from gateway.settings import GatewaySettings
from specdec.core.errors import DeadlineExceeded, InvalidArgument, ModelMismatch, ReplicaLost
from specdec.telemetry.prometheus import Scrape
from target_service.verifier import Job
from testing.raw import started
from testing.table_model import TableVerifier
from tests.gateway.conftest import MODEL, serving, with_keys
from tests.gateway.test_bounds import connect
from tests.gateway.test_errors import CHAT, COMPLETION, is_an_error
from tests.instruments import total

PAGE = "https://page.example"
LONG: dict[str, Any] = {**COMPLETION, "max_tokens": 50_000}


@pytest.mark.slow
async def test_an_idle_connection_is_kept_for_longer_than_proxies_keep_theirs() -> None:
    assert GatewaySettings(orchestrator=["a:1"]).idle_connection_s == 75.0, "nginx: 60 s"
    for idle_s in (0.3, 1.5):
        async with serving(gateway={"idle_connection_s": idle_s}) as running:
            reader, writer = await connect(running, b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            since = time.monotonic()
            assert await asyncio.wait_for(reader.read(), 30) == b""
            assert idle_s - 0.1 < time.monotonic() - since < idle_s + 1.0
            writer.close()


async def test_further_names_of_this_machine_are_a_setting_that_a_refusal_names() -> None:
    hosts = ("llm.example.com", "LLM.example.com:443", "host.docker.internal")
    async with serving() as strict, serving(gateway={"allowed_hosts": "llm.example.com,host.docker.internal"}) as open_:
        for host in hosts:
            refused = await strict.http.get("/v1/models", headers={"host": host})
            assert (refused.status_code, is_an_error(refused.json())) == (400, True)
            assert "--allowed-hosts" in refused.json()["error"]["message"]
            assert (await open_.http.get("/v1/models", headers={"host": host})).status_code == 200
        for host in ("evil.example", "llm.example.com.evil.example", ""):
            assert (await open_.http.get("/v1/models", headers={"host": host})).status_code == 400
        reader, writer = await connect(strict, b"GET /v1/models HTTP/1.0\r\n\r\n")  # of no browser
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()
    async with serving(gateway={"allowed_hosts": "*"}) as running:
        assert (await running.http.get("/v1/models", headers={"host": "any.example"})).status_code == 200


async def test_a_proxy_may_keep_its_prefix_or_strip_it() -> None:
    async with serving(gateway={"root_path": "/llm/"}) as running:
        for prefix in ("", "/llm"):
            assert (await running.http.post(f"{prefix}/v1/completions", json=COMPLETION)).status_code == 200
            page = await running.http.get(f"{prefix}/", follow_redirects=True)
            assert page.status_code == 200
            for asset in re.findall(r'(?:src|href)="(playground/[^"]+)"', page.text):
                assert (await running.http.get(str(page.url.join(asset)))).status_code == 200
        assert (await running.http.get("/llmv1/models")).status_code == 404
        assert (await running.http.get("/openapi.json")).json()["servers"] == [{"url": "/llm"}]


async def test_refusals_of_browsers_questions_are_json_and_pages_by_name_may_call_a_private_network() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    async with serving(gateway={"allowed_origins": PAGE}) as running:
        options = running.http.options
        allowed = await options("/v1/completions", headers={"origin": PAGE, **asked})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-private-network"] == "true"
        refused = await options("/v1/completions", headers={"origin": "https://evil.example", **asked})
        assert (refused.status_code, is_an_error(refused.json())) == (400, True)
        assert "--allowed-origins" in refused.json()["error"]["message"]
        other = await options("/v1/completions", headers={"origin": PAGE, "access-control-request-method": "BREW"})
        assert (other.status_code, is_an_error(other.json())) == (400, True)
    async with serving(gateway={"allowed_origins": "*"}) as running:
        for question, status in ((asked, 400), ({"access-control-request-method": "POST"}, 200)):
            response = await running.http.options("/v1/completions", headers={"origin": PAGE, **question})
            assert response.status_code == status
    async with serving() as running:
        none = await running.http.options("/v1/completions", headers={"origin": PAGE, **asked})
        assert (none.status_code, is_an_error(none.json())) == (405, True)


async def test_an_unknown_path_is_told_what_there_is() -> None:
    async with serving() as running:
        for method, path in (("POST", "/v1/messages"), ("POST", "/chat/completions"), ("GET", "/v1/embeddings")):
            refused = await running.http.request(method, path)
            assert (refused.status_code, is_an_error(refused.json())) == (404, True)
            message = refused.json()["error"]["message"]
            assert f"{method} {path}" in message
            assert "/v1/chat/completions, " in message
        wrong = await running.http.get("/v1/completions")
        assert wrong.json()["error"]["message"] == "Method Not Allowed: GET /v1/completions, but POST"
        assert wrong.headers["allow"] == "POST"


async def test_a_model_has_the_names_that_it_is_served_under() -> None:
    async with serving(gateway={"served_model_name": "gpt-4o,local"}) as running:
        models = (await running.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["gpt-4o", "local"]
        for name in ("gpt-4o", "local", None):
            answer = await running.http.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, "gpt-4o")
        assert (await running.http.get("/v1/models/local")).json()["id"] == "local"
        for refused in (
            await running.http.post("/v1/completions", json={**COMPLETION, "model": MODEL}),
            await running.http.get(f"/v1/models/{MODEL}"),
        ):
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (404, "model_not_found")
            assert error["message"] == f"The model `{MODEL}` does not exist. Served here: gpt-4o, local"


async def test_a_priority_has_a_name_or_vllm_s_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    verify = TableVerifier.verify

    def noted(verifier: TableVerifier, jobs: Sequence[Job[Any]]) -> Any:
        asked.update(job.open.spec.priority.name.lower() for job in jobs)
        return verify(verifier, jobs)

    monkeypatch.setattr(TableVerifier, "verify", noted)
    names = {"interactive": "interactive", -5: "interactive", 0: "standard", 1: "batch", "batch": "batch"}
    async with serving() as running:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            for value, name in names.items():
                asked.clear()
                answer = await running.http.post(path, json={**body, "priority": value})
                assert (answer.status_code, asked) == (200, {name})


async def test_an_adapter_is_named_like_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    verify = TableVerifier.verify

    def noted(verifier: TableVerifier, jobs: Sequence[Job[Any]]) -> Any:
        asked.update(job.open.adapter for job in jobs)
        return verify(verifier, jobs)

    monkeypatch.setattr(TableVerifier, "verify", noted)
    async with serving(adapters=("sql", "poems")) as running:
        http = running.http
        models = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model.get("parent")) for model in models] == [
            (MODEL, None),
            ("sql", MODEL),
            ("poems", MODEL),
        ]
        assert (await http.get("/v1/models/sql")).json() == models[1]
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {**COMPLETION, "prompt": ["a", "b"]}),
            ("/v1/responses", {"input": "a", "max_output_tokens": 8}),
        ):
            for name, adapter in (("sql", "sql"), (MODEL, ""), ("poems", "poems")):
                asked.clear()
                answer = await http.post(path, json={**body, "model": name})
                assert (answer.status_code, answer.json()["model"], asked) == (200, name, {adapter})
        refused = await http.post("/v1/chat/completions", json={**CHAT, "model": "prose"})
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].endswith(f"Served here: {MODEL}, sql, poems")


async def test_a_context_that_is_exceeded_is_told_in_words_that_clients_look_for() -> None:
    """LiteLLM, LangChain and agents shorten a conversation by them."""
    async with serving(context_length=64) as running:
        message = {"role": "user", "content": "a b c d"}
        tokens = (await running.http.post("/tokenize", json={"messages": [message]})).json()["count"]
        for name in ("max_tokens", "max_completion_tokens"):
            body = {"messages": [message], name: 100_000}
            refused = await running.http.post("/v1/chat/completions", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["message"] == (
                f"This model's maximum context length is 64 tokens. However, you requested {tokens + 100_000} tokens"
                f" ({tokens} in the prompt, 100000 in the completion). Please reduce the length of the prompt or of the"
                " completion."
            )
        for body in ({"prompt": "a b " * 100}, {"prompt": "a" * 100_000}, {"prompt": [5] * 64}):
            error = (await running.http.post("/v1/completions", json=body)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith("This model's maximum context length is 64 tokens. However, you")


def test_problems_name_each_field_as_the_caller_does() -> None:
    chat = ChatBody.model_validate({**CHAT, "max_completion_tokens": 3})
    response = chat_of(ResponsesBody(input="a", max_output_tokens=3))
    for body, problem, expected in (
        (
            chat,
            ("min_tokens", "must be at most max_tokens = 3"),
            "min_tokens: must be at most max_completion_tokens = 3",
        ),
        (chat, ("chat", "this model has no chat template"), "messages: this model has no chat template"),
        (response, ("chat", "this model has no chat template"), "input: this model has no chat template"),
        (
            response,
            ("min_tokens", "must be at most max_tokens = 3"),
            "min_tokens: must be at most max_output_tokens = 3",
        ),
        (
            CompletionBody(prompt=[5]),
            ("add_special_tokens", "not possible with token_ids"),
            "add_special_tokens: not possible with prompt",
        ),
    ):
        with pytest.raises(InvalidArgument, match=f"^{expected}$"), translation.names_of(body):
            raise InvalidArgument([problem])


async def test_a_shutdown_ends_streams_with_an_error_and_lets_short_ones_end(measured: InMemoryMetricReader) -> None:
    """So does it end answers that are not streamed. None of them is counted as 200."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving(pass_s=0.02, gateway={"shutdown_grace_s": 1.0}))
        streamed = asyncio.create_task(running.http.post("/v1/completions", json={**LONG, "stream": True}))
        chat = asyncio.create_task(
            running.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 50_000, "stream": True})
        )
        short = asyncio.create_task(running.http.post("/v1/completions", json={**COMPLETION, "stream": True}))
        whole = asyncio.create_task(running.http.post("/v1/completions", json=LONG))
        while running.cluster.orchestrator.live_sequences < 3:
            await asyncio.sleep(0.01)
        await running.gateway.stop()
        for broken in (await streamed, await chat):
            *_, last = broken.text.strip().split("\n\n")
            assert is_an_error(error := json.loads(last.removeprefix("data: ")))
            assert error["error"]["message"] == "this server is shutting down"
        assert (await short).text.endswith("data: [DONE]\n\n")
        assert (await whole).status_code == 503
        assert is_an_error((await whole).json())
        await running.cluster.settled()
        assert counted(measured) == {("chat", 503): 1, ("completions", 503): 2, ("completions", 200): 1}


async def test_a_stream_counts_by_how_it_ends(measured: InMemoryMetricReader) -> None:
    async with serving(pass_s=0.02, gateway={"request_timeout_s": 0.5}) as running:
        await running.http.post("/v1/completions", json={**LONG, "stream": True})
        async with running.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as left:
            await anext(left.aiter_lines())
        await running.cluster.settled()
        assert (await running.http.post("/v1/completions", json={**COMPLETION, "stream": True})).status_code == 200
        assert counted(measured) == {("completions", 504): 1, ("completions", 499): 1, ("completions", 200): 1}


async def test_a_stream_whose_client_leaves_before_its_first_event_is_counted_and_closed(
    measured: InMemoryMetricReader,
) -> None:
    body = json.dumps({**LONG, "stream": True}).encode()
    messages, has_begun = [{"type": "http.request", "body": body}], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not messages:
            await has_begun.wait()
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        has_begun.set()
        await asyncio.sleep(60)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    async with serving(pass_s=0.02) as running:
        await running.gateway._gateway.app()(scope, receive, send)  # type: ignore[arg-type]
        assert counted(measured) == {("completions", 499): 1}
        await running.cluster.settled(5.0)


async def test_what_begins_after_the_end_of_a_server_is_ended_too() -> None:
    async with serving(pass_s=0.02) as running:
        running.gateway._gateway.end()
        for stream in (False, True):
            refused = await running.http.post("/v1/completions", json={**LONG, "stream": stream}, timeout=10)
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "this server is shutting down"


def counted(reader: InMemoryMetricReader) -> dict[tuple[Any, Any], float]:
    """Answers by route and status."""
    counts = total(reader)["specdec.gateway.requests"]
    return {(dict(key)["route"], dict(key)["status"]): count for key, count in counts.items()}


async def test_metrics_are_there_without_an_orchestrator(tmp_path: Any) -> None:
    async with (
        started(GatewayServer(GatewaySettings(orchestrator=["127.0.0.1:1"]), Scrape())) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http,
    ):
        page = await http.get("/metrics")
        assert page.status_code == 200
        lost = await http.get("/v1/models")
        assert lost.status_code == 503
        assert lost.json()["error"]["message"] == "the connection to the orchestrator is lost", "and no address"
    async with serving(**with_keys(tmp_path)) as running:
        secret = {"authorization": "Bearer secret"}
        for headers, status in (({}, 401), (secret, 200)):
            assert (await running.http.get("/metrics", headers=headers)).status_code == status
        await running.cluster.orchestrator.stop(0.0)
        for headers, status in (({}, 503), (secret, 200)):
            assert (await running.http.get("/metrics", headers=headers)).status_code == status, "its key is known"


def test_no_error_has_an_address_in_it() -> None:
    for kind in (ReplicaLost, ModelMismatch, DeadlineExceeded):
        assert "10.0.0.7" not in str(http_error(kind("no answer of 10.0.0.7:50050")).body)


def test_what_leaves_is_json_that_every_client_reads() -> None:
    """Whatever the model wrote."""
    odd = {"a": "x\ud83dy", "\udc00": 1}
    for data in (sse.event(odd).removeprefix(b"data: "), Json(odd).body):
        assert json.loads(bytes(data).decode()) == {"a": "x?y", "?": 1}


async def test_too_many_connections_are_refused_in_json() -> None:
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving(pass_s=0.02, gateway={"max_connections": 2}))
        for _ in range(2):
            await stack.enter_async_context(
                running.http.stream("POST", "/v1/completions", json={**LONG, "stream": True})
            )
        refused = await running.http.get("/ping")
        assert (refused.status_code, is_an_error(refused.json())) == (503, True)
        assert refused.headers["retry-after"] == "1"

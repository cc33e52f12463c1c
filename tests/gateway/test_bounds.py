"""What a caller can make the gateway spend, before its key is known: bytes, items, seconds, connections."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from gateway import callers, connections, reading
from gateway.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.errors import HttpError
from gateway.parsing import MAX_NESTED, parsed
from tests.gateway.conftest import Running, serving, with_keys

COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 4}
MESSAGE = {"role": "user", "content": "a"}
LARGE = "a" * 100_000

# --- items --------------------------------------------------------------------------------------------------

MANY = 3_000
ITEMS: list[Any] = [{}, [], "a", 1, 1.5, None, True, {"a": 1}, [1], ["a"]]
LISTS = [[item] * MANY for item in ITEMS] + [[1] * MANY + ["a"] * MANY, ["a"] * MANY + [1] * MANY]
VALUES: list[Any] = [*LISTS, {f"{number}": "x" for number in range(MANY)}, {f"x{number}": 1 for number in range(MANY)}]


def hostile() -> Iterator[tuple[type[BaseModel], dict[str, Any]]]:
    """Bodies with very many bad values, at each place."""
    for value in VALUES:
        for kind in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody):
            for name in kind.model_fields:
                yield kind, {"prompt": "a", "messages": [MESSAGE], "tokens": [1], name: value}
        for name in ("content", "tool_calls", "annotations", "refusal"):
            yield ChatBody, {"messages": [{**MESSAGE, name: value}] * MANY}
        yield ChatBody, {"messages": [{**MESSAGE, "content": [{"type": "text", "text": value}] * MANY}]}
        yield ChatBody, {"messages": [MESSAGE], "tools": [{"type": "function", "function": value}] * 128}
        for name in ("json", "choice", "regex"):
            yield CompletionBody, {"prompt": "a", "structured_outputs": {name: value}}
    fields = {f"unknown{number}": 1 for number in range(MANY)}
    yield ChatBody, {"messages": [MESSAGE], **fields}
    yield ChatBody, {"messages": [{**MESSAGE, **fields}] * MANY}


def test_the_problems_of_a_body_are_few_however_many_items_it_has():
    num_refused = 0
    for kind, body in hostile():
        problems = 0
        try:
            kind.model_validate(body)
        except ValidationError as error:
            problems = error.error_count()
        num_refused += problems > 0
        assert problems < 32, (kind, body.keys())
    assert num_refused > 500


def test_objects_and_lists_are_counted_and_brackets_of_texts_are_not():
    for item in ("{}", "[]", '{"":[[]]}', '{"\\\\":{"\\"":{}}}'):
        data = f'{{"prompt": [{",".join([item] * MAX_NESTED)}]}}'.encode()
        with pytest.raises(HttpError) as refused:
            parsed(data, CompletionBody, False)
        assert refused.value.status == 413
    for text in ("[{" * MAX_NESTED, '"[{' * MAX_NESTED, "\\[{" * MAX_NESTED, '\\"[{\\\\' * MAX_NESTED):
        data = json.dumps({"prompt": text}).encode()
        assert parsed(data, CompletionBody, False).prompt == text


@pytest.mark.slow
def test_a_body_takes_memory_in_proportion_to_its_bytes():
    program = """
    import json, sys
    from gateway.bodies import ChatBody, CompletionBody
    from gateway.errors import HttpError
    from gateway.parsing import parsed

    def peak():
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

    ITEMS = ["{}", "[]", "1", '"ab"', "1.5", '1,"a"', "[0]", '{"":' * 150 + "1" + "}" * 150, '{"role":"user"}']
    before = peak()
    for kind, begins, ends in (
        (CompletionBody, '{"prompt":[', "]}"),
        (CompletionBody, '{"prompt":"a","stop_token_ids":[', "]}"),
        (ChatBody, '{"messages":[', "]}"),
        (ChatBody, '{"messages":[{"role":"user","content":[', "]}]}"),
    ):
        for item in ITEMS:
            data = (begins + ",".join([item] * ((4 << 20) // (len(item) + 1) - 20)) + ends).encode()
            try:
                parsed(data, kind, False)
            except HttpError:
                pass
    print((peak() - before) >> 20)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 150, "MiB: one body of 4 MiB in many forms, one after another"


# --- bytes --------------------------------------------------------------------------------------------------


async def test_a_large_body_is_read_of_callers_with_a_key_alone(tmp_path, monkeypatch):
    read: list[int] = []
    monkeypatch.setattr(reading, "parsed", lambda data, *rest: read.append(len(data)) or parsed(data, *rest))
    async with serving(**with_keys(tmp_path)) as running:
        for body in (COMPLETION | {"prompt": LARGE}, COMPLETION | {"user": LARGE}):
            for key, status in (("", 401), ("Bearer wrong", 401)):
                response = await running.http.post("/v1/completions", json=body, headers={"authorization": key})
                assert response.status_code == status, response.text
        assert read == []
        headers = {"authorization": "Bearer secret"}
        response = await running.http.post("/v1/completions", json=COMPLETION | {"user": LARGE}, headers=headers)
        assert response.status_code == 200, response.text
        assert len(read) == 1


async def test_what_is_too_large_for_the_orchestrators_is_not_to_be_sent_again():
    async with serving() as running:
        send = running.http.post
        headers = [{"authorization": "Bearer " + "a" * 5_000}, {"authorization": "a" * 14_000}]
        for header in headers:
            response = await send("/v1/completions", json=COMPLETION, headers=header)
            assert response.status_code == 431, response.text
            assert response.json()["error"]["message"]
            assert "retry-after" not in response.headers
        schema = {"type": "object", "description": "é" * (1 << 20)}  # json.dumps takes three times the bytes
        data = json.dumps({**COMPLETION, "structured_outputs": {"json": schema}}, ensure_ascii=False)
        response = await send("/v1/completions", content=data.encode())
        assert response.status_code == 413, response.text
        assert "retry-after" not in response.headers
        assert "max (" not in response.text
        reader, writer = await connect(running, b"GET /ping HTTP/1.1\r\nx-other: " + b"a" * 70_000)
        assert (got := await answer(reader)).startswith(b"HTTP/1.1 431"), got
        writer.close()


def test_of_the_headers_only_what_has_their_form_goes_on():
    def sent(**headers: str) -> dict[str, str]:
        pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
        request = Request({"type": "http", "headers": pairs})
        request.state.request_id = callers.request_id(request)
        return dict(callers.metadata_of(request))

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert sent(x_request_id="mine", traceparent=trace)["traceparent"] == trace
    assert sent(x_request_id="a" * 9_000)["x-request-id"] == "a" * callers.MAX_REQUEST_ID
    for bad in (trace * 200, trace.upper(), "", "00-0af7", "é"):
        assert "traceparent" not in sent(traceparent=bad)
    for bad in ("é", "a\tb"):
        assert "authorization" not in sent(authorization=bad)
        assert sent(x_request_id=bad)["x-request-id"] != bad


# --- seconds ------------------------------------------------------------------------------------------------


async def connect(running: Running, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.gateway.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


def post(length: int, data: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % length + data


async def answer(reader: asyncio.StreamReader) -> bytes:
    """All of it, until the gateway ends the connection."""
    return await asyncio.wait_for(reader.read(), 30)


async def test_a_request_that_does_not_arrive_is_given_up(monkeypatch):
    monkeypatch.setattr(connections, "_HEADERS_S", 0.2)
    monkeypatch.setattr(reading, "_BODY_S", 0.2)
    async with serving(gateway={"keep_alive_s": 60.0}) as running:
        parts = {
            b"": b"",
            b"POST /v1/completions HTTP/1.1\r\nhost: loc": b"408",
            post(100, b""): b"408",
            post(100, b'{"prompt": '): b"408",
            post(1 << 20, b" " * 200_000): b"408",
        }
        for sent, status in parts.items():
            reader, writer = await connect(running, sent)
            got = await answer(reader)
            assert got.startswith(b"HTTP/1.1 " + status if status else b""), (sent[:80], got)
            assert (b'"error"' in got) == bool(got), got
            writer.close()
        reader, writer = await connect(running, b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET /pi")  # the next one on the same connection
        assert (await answer(reader)).startswith(b"HTTP/1.1 408")
        writer.close()
        assert running.gateway.num_connections <= 1


async def test_large_bodies_have_a_bound_together(monkeypatch):
    monkeypatch.setattr(reading, "_MAX_HELD_BYTES", 300_000)
    async with serving() as running:
        slow = [await connect(running, post(1 << 20, b" " * 200_000))]
        body = COMPLETION | {"user": LARGE * 2}
        async with asyncio.timeout(30):
            while (refused := await running.http.post("/v1/completions", json=body)).status_code == 200:
                await asyncio.sleep(0.01)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200
        slow[0][1].close()
        async with asyncio.timeout(30):
            while (await running.http.post("/v1/completions", json=body)).status_code != 200:
                await asyncio.sleep(0.01)


# --- connections --------------------------------------------------------------------------------------------


async def test_connections_without_a_request_make_room_for_those_with_one():
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving(pass_s=0.01, gateway={"max_connections": 4}))
        long = {**COMPLETION, "max_tokens": 3000, "stream": True}
        stream = await stack.enter_async_context(running.http.stream("POST", "/v1/completions", json=long))
        lines = stream.aiter_lines()
        await anext(lines)
        parts = [b"", b"GET /pi", post(100, b"{"), b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"]
        held = [await connect(running, parts[number % 4]) for number in range(20)]
        await held[-1][0].readuntil(b"\r\n")
        for _ in range(3):
            reader, writer = await connect(
                running, b"GET /ping HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            )
            assert (await answer(reader)).startswith(b"HTTP/1.1 200")
            writer.close()
        assert running.gateway.num_connections <= 4
        assert await answer(held[0][0]) == b""
        await anext(lines)
        for _, writer in held:
            writer.close()


# --- pages --------------------------------------------------------------------------------------------------


PAGES = [
    ("api.example.org", None, None, True),  # no page: curl, or a client library
    ("localhost:8000", "http://localhost:8000", "same-origin", True),
    ("10.0.0.7:8000", "http://10.0.0.7:8000", None, True),
    ("[::1]:8000", "http://[::1]:8000", None, True),
    ("box:8000", "http://box:8000", None, True),
    ("api.example.org", "https://api.example.org", None, True),
    ("backend:8000", "https://api.example.org", "same-origin", True),  # behind a proxy
    ("backend:8000", "https://page.example", "cross-site", True),  # allowed_origins
    ("localhost:8000", "https://evil.example", "cross-site", False),
    ("localhost:8000", "https://evil.example", None, False),
    ("localhost:8000", "http://localhost:9000", "same-site", False),
    ("evil.example:8000", "http://evil.example:8000", None, False),  # a name that leads here
    ("localhost:8000", "null", "cross-site", False),
    ("localhost:8000", "http://[", None, False),
]


async def test_a_page_from_elsewhere_may_not_call():
    settings = {"host": "0.0.0.0", "insecure": True, "allowed_origins": "https://page.example"}
    async with serving(gateway=settings) as running:
        for host, origin, site, allowed in PAGES:
            given = {"host": host, "origin": origin, "sec-fetch-site": site, "content-type": "text/plain"}
            headers = {name: value for name, value in given.items() if value is not None}
            response = await running.http.post("/v1/completions", content=json.dumps(COMPLETION), headers=headers)
            assert response.status_code == (200 if allowed else 403), (given, response.text)
            if not allowed:
                assert "allowed_origins" in response.json()["error"]["message"]


# --- keys ---------------------------------------------------------------------------------------------------


async def test_without_a_key_all_names_of_models_are_alike(tmp_path):
    async with serving(**with_keys(tmp_path)) as running:
        get, headers = running.http.get, {"authorization": "Bearer secret"}
        served = (await get("/v1/models", headers=headers)).json()["data"][0]["id"]
        for key, statuses in ((headers, (200, 404)), ({}, (401, 401)), ({"authorization": "Bearer no"}, (401, 401))):
            for name, status in zip((served, "other"), statuses, strict=True):
                body = {**COMPLETION, "model": name}
                response = await running.http.post("/v1/completions", json=body, headers=key)
                assert response.status_code == status, (key, name, response.text)
                assert (await get(f"/v1/models/{name}", headers=key)).status_code == status

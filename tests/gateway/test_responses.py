"""/v1/responses says what chat completions say, in items and events as OpenAI's own types have them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState  # type: ignore[import-untyped]
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway import translation
from gateway.answers import Answer
from gateway.errors import HttpError
from gateway.parsing import parsed
from gateway.responses_answer import ResponsesAnswer
from gateway.responses_body import ResponsesBody, chat_of
from gateway.tools import Parser
from specdec.v1 import generation_pb2
from tests.gateway.conftest import MODEL, serving, serving_demo, with_keys
from tests.gateway.test_conversations import USER, with_template
from tests.gateway.test_forced_calls import Order
from tests.gateway.test_reasoning import TEMPLATE

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BODY: dict[str, Any] = {"input": "a", "max_output_tokens": 8, "seed": 3}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["days"],
    },
}
CALLED = '<tool_call>{"name": "get_weather", "arguments": {"days": 3}}</tool_call>'


OF_ONE_ANSWER = ("id", "call_id", "item_id", "created_at", "completed_at", "metrics", "input_tokens_details")


def without(names: Sequence[str], value: Any) -> Any:
    """``value`` without the fields of these names, at every depth."""
    if isinstance(value, dict):
        return {name: without(names, inner) for name, inner in value.items() if name not in names}
    return [without(names, inner) for inner in value] if isinstance(value, list) else value


def events_of(text: str) -> list[dict[str, Any]]:
    """Those of a stream, if they are as OpenAI's types have them and in order."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    checked(events)
    return events


def checked(events: Sequence[dict[str, Any]]) -> Response:
    """The response that OpenAI's client puts together."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    state: Any = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for event in events:
        valid = EVENT.validate_python(event, strict=True)
        assert valid.type == event["type"]
        assert not set(valid.model_extra or ()) - {"name"}, "it is the type that the client knows by this name"
        state.handle_event(valid)
    response = Response.model_validate(events[-1]["response"], strict=True)
    if response.status == "completed":
        read = without(["parsed", "parsed_arguments"], state._completed_response.to_dict()["output"])
        assert read == events[-1]["response"]["output"]
    return response


async def test_a_response_is_the_answer_of_the_chat_whole_and_by_events() -> None:
    chat = {"messages": [{"role": "system", "content": "Be short."}, USER], "seed": 3, "max_tokens": 12}
    body = {"instructions": "Be short.", "input": [USER], "seed": 3, "max_output_tokens": 12}
    async with serving() as running:
        expected = (await running.http.post("/v1/chat/completions", json={**chat, "logprobs": True})).json()
        [choice] = expected["choices"]
        text, logprobs = choice["message"]["content"], choice["logprobs"]["content"]
        clients_own = {"store": True, "background": False, "metadata": {"a": "b"}, "include": [], "tools": []}
        for fields, status in (({}, "incomplete"), ({"stop": text[9:12]}, "completed"), (clients_own, "incomplete")):
            whole = (await running.http.post("/v1/responses", json={**body, **fields})).json()
            response = Response.model_validate(whole, strict=True)
            assert response.output_text == (text if status == "incomplete" else text[: text.index(text[9:12])])
            assert (response.status, response.output[0].type, whole["store"]) == (status, "message", False)
            assert response.incomplete_details is None or response.incomplete_details.reason == "max_output_tokens"
            assert response.usage.input_tokens == expected["usage"]["prompt_tokens"]
            streamed = await running.http.post("/v1/responses", json={**body, **fields, "stream": True})
            events = events_of(streamed.text)
            assert events[-1]["type"] == f"response.{status}"
            assert without(OF_ONE_ANSWER, events[-1]["response"]) == without(OF_ONE_ANSWER, whole)
            assert "[DONE]" not in streamed.text
        assert whole["metadata"] == {"a": "b"}
        assert whole["usage"]["output_tokens"] == expected["usage"]["completion_tokens"]
        assert whole["metrics"]["speculative_decoding"]
        for fields in ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 0, "stream": True}):
            wanted = {**body, "include": ["message.output_text.logprobs"], **fields}
            answer = await running.http.post("/v1/responses", json=wanted)
            response = events_of(answer.text)[-1]["response"] if fields.get("stream") else answer.json()
            assert response["output"][0]["content"][0]["logprobs"] == logprobs


def answered(
    pieces: Sequence[str], parser: Parser, reason: int = generation_pb2.FINISH_REASON_STOP, **fields: Any
) -> tuple[list[dict[str, Any]], Response]:
    """The events of an answer in pieces, and the response as OpenAI's client reads it."""
    body = ResponsesBody.model_validate(BODY | fields)
    answer = ResponsesAnswer(body, Answer(chat_of(body), 1, "request", "model", lambda: parser))
    messages = [generation_pb2.GenerateResponse(admission=generation_pb2.Admission())]
    messages += [generation_pb2.GenerateResponse(chunk=generation_pb2.Chunk(text=piece)) for piece in pieces]
    last = generation_pb2.Chunk(finish=generation_pb2.Finish(reason=reason))  # type: ignore[arg-type]
    messages.append(generation_pb2.GenerateResponse(chunk=last))
    # An event shares its items with the response, which goes on.
    events = [json.loads(json.dumps(event)) for message in messages for event in answer.chunks(0, message)]
    events += [json.loads(json.dumps(event)) for event in answer.ends()]
    return events, checked(events)


@pytest.mark.parametrize("cut", [1, 7, 1000])
@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_text_and_calls_are_items_however_the_text_is_cut(cut: int, summary: str | None) -> None:
    text = f"<think>So.</think>I look.{CALLED}{CALLED}Fine."
    pieces = [text[start : start + cut] for start in range(0, len(text), cut)]
    fields = {"reasoning": {"effort": "low", "summary": summary}, "tools": [FUNCTION]}
    events, response = answered(pieces, Parser("hermes", reasoning=True), **fields)
    thought, look, *calls, fine = response.to_dict()["output"]
    part = {"type": "summary_text" if summary else "reasoning_text", "text": "So."}
    assert thought["summary" if summary else "content"] == [part]
    assert (look["content"][0]["text"], fine["content"][0]["text"]) == ("I look.", "Fine.")
    assert [(call["name"], call["arguments"]) for call in calls] == [("get_weather", '{"days": 3}')] * 2
    assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    assert list(texts.values()) == ["So.", "I look.", '{"days": 3}', '{"days": 3}', "Fine."]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response.to_dict()["output"]
    assert {item["status"] for item in done} == {"completed"}


def test_what_is_cut_is_incomplete_and_no_text_is_an_empty_message() -> None:
    events, response = answered(CALLED[:60], Parser("hermes"), generation_pb2.FINISH_REASON_LENGTH, tools=[FUNCTION])
    assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")
    assert (events[-1]["type"], response.output[-1].type) == ("response.incomplete", "function_call")
    for text in ("", "<think>So.</think>"):
        _, response = answered([text], Parser(reasoning=True))
        assert (response.output_text, response.output[-1].type, response.status) == ("", "message", "completed")


def test_items_are_the_messages_of_a_chat() -> None:
    output = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "sunny"}]}
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "1",
        "name": "f",
        "arguments": "{}",
        "status": "completed",
    }
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "So.\n"}],
    }
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": None}
    said = {"type": "message", "id": "msg_1", "role": "assistant", "content": "Fine.", "phase": "final_answer"}
    turns = [USER, thought, said, call, said, call, output, summary, call, output, said, said]
    items = [*turns, {**USER, "role": "developer"}]
    body = ResponsesBody.model_validate({"input": items, "instructions": "Be short."})
    messages = [
        (message.role, message.reasoning, len(message.tool_calls or ()), bool(message.content))
        for message in chat_of(body).messages
    ]
    assert messages == [
        ("system", None, 0, True),
        ("user", None, 0, True),
        ("assistant", "So.\n", 2, True),
        ("tool", None, 0, True),
        ("assistant", "Hm.", 1, False),
        ("tool", None, 0, True),
        ("assistant", None, 0, True),
        ("developer", None, 0, True),
    ]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here"),
    ({"conversation": "conv_1"}, "conversation", "nothing is stored here"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "nothing is stored here"),
    ({"background": True}, "background", "False"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "nothing is stored here"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0]", "web_search_call: not supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "input_text"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search: not supported"),
    ({"tool_choice": {"type": "mcp", "server_label": "a"}}, "tool_choice", "function"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"truncation": "auto"}, "truncation", "disabled"),
    ({"include": ["everything"]}, "include[0]", "include[0]"),
    ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "schema": [1]}}}, "text.format.schema", "dictionary"),
    (
        {"text": {"format": {"type": "json_object"}}},
        "text.format",
        "not supported by this target",
    ),  # no table model can
    (
        {"text": {"format": {"type": "json_object"}}, "tools": [FUNCTION], "tool_choice": "required"},
        "tool_choice",
        "not possible with text.format",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "", "arguments": "{}"}]},
        "input[0].name",
        "at least 1",
    ),
]


async def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(**with_keys(tmp_path)) as running:
        assert (await running.http.post("/v1/responses", json=BODY)).status_code == 401
        running.http.headers["authorization"] = "Bearer secret"
        for fields, param, words in REFUSED:
            for stream in (False, True):
                answer = await running.http.post("/v1/responses", json={**BODY, **fields, "stream": stream})
                error = answer.json()["error"]
                assert answer.status_code == 400, fields
                assert error["param"].startswith(param), (fields, error)
                assert words in error["message"], (fields, error)
        unknown = await running.http.get("/v1/responses/resp_1")
        assert (unknown.status_code, "/v1/responses" in unknown.text) == (404, True)


WRONG: list[Any] = [None, True, 5, -1, 1.5, "x", "", [], [[]], [5], [None], ["x"], [{}], {}, {"type": 5}, {"type": []}]
WRONG += [
    {"type": "function"},
    [{"type": "function"}],
    {"format": []},
    {"format": {"type": "json_schema", "schema": 5}},
]
KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference", 5, [], {})
INNER = ("content", "output", "summary", "arguments", "name", "role", "call_id", "message", "reasoning", "parameters")


def test_no_bad_shape_of_a_field_is_a_defect() -> None:
    bodies = [{**BODY, name: value} for name in ResponsesBody.model_fields for value in WRONG]
    for kind in KINDS:
        for value in (*WRONG, [{"type": "reasoning_text", "text": 5}], [{"type": "input_text"}]):
            full = {"type": kind, **dict.fromkeys(INNER, "x")}
            bodies += [{**BODY, "input": [full | {name: value}]} for name in INNER]
            bodies += [{**BODY, "tools": [{**FUNCTION, "type": kind, name: value}]} for name in INNER]
    refused: list[tuple[dict[str, Any], HttpError]] = []
    for body in bodies:
        try:
            translation.of_responses(parsed(json.dumps(body).encode(), ResponsesBody, False))
        except HttpError as error:
            refused.append((body, error))
    for body, error in refused:
        changed = tuple(name for name in body if body[name] != BODY.get(name))
        assert error.status == 400
        assert error.body["error"]["param"].startswith(changed), (body, error)
    assert len(bodies) // 2 < len(refused) < len(bodies)


async def test_a_stream_that_breaks_ends_with_a_response_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = Answer.chunks

    def broken(answer: Answer, prompt: int, response: Any) -> Any:
        if response.HasField("chunk") and response.chunk.HasField("finish"):
            raise ValueError("a secret")
        return chunks(answer, prompt, response)

    async with serving(pass_s=0.02, gateway={"shutdown_grace_s": 1.0}) as running:
        long = {**BODY, "max_output_tokens": 50_000, "stream": True}
        ended = asyncio.create_task(running.http.post("/v1/responses", json=long))
        with monkeypatch.context() as patched:
            patched.setattr(Answer, "chunks", broken)
            failed = await running.http.post("/v1/responses", json={**BODY, "stream": True})
        while running.cluster.orchestrator.live_sequences < 1:
            await asyncio.sleep(0.01)
        await running.gateway.stop()
        for stream, message in ((failed, "has failed"), (await ended, "shutting down")):
            *_, delta, last = events_of(stream.text)
            assert delta["type"] == "response.output_text.delta"
            assert last["type"] == "response.failed"
            assert last["response"]["error"]["code"] == "server_error"
            assert message in last["response"]["error"]["message"]
            assert last["response"]["output"] == []


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway in front of the demo target; its template opens the reasoning."""
    async with serving_demo(with_template(tmp_path, TEMPLATE), reasoning_format="think") as http:
        yield http


@pytest.mark.slow
async def test_the_official_client_creates_streams_parses_and_calls(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"model": "target", "max_output_tokens": 200}
    thinks_not: dict[str, Any] = {"reasoning": {"effort": "none"}}
    tools: Any = [FUNCTION, {"type": "function", "name": "now", "parameters": None}]
    async with openai.AsyncOpenAI(base_url=str(http.base_url.join("v1")), api_key="none") as client:
        history: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        script = {"structured_outputs": {"choice": [f"So.\n</think>\n\nI look.\n{CALLED}"]}}
        response = await client.responses.create(**asked, input=history, tools=tools, extra_body=script)
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert response.usage.output_tokens_details.reasoning_tokens >= 3
        call: Any = response.output[-1]
        history += response.output
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
        script = {"structured_outputs": {"choice": ["Sunny."]}}
        second: Any = client.responses.stream(**asked, input=history, tools=tools, extra_body=script, **thinks_not)
        async with second as events:
            assert (await events.get_final_response()).output_text == "Sunny."
        final = await client.responses.parse(**asked, input="x", text_format=Order, **thinks_not)
        assert isinstance(final.output_parsed, Order)
        for choice in ("required", {"type": "function", "name": "get_weather"}):
            forced: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, **thinks_not}
            called: Any = (await client.responses.create(**asked, input="x", **forced)).output[-1]
            assert called.name == "now" or 1 <= json.loads(called.arguments)["days"] <= 9


@pytest.mark.slow
def test_bodies_follow_the_schema_of_open_responses(running_in_a_thread: str) -> None:
    """But for settings that the server has its own defaults of: these are null."""
    command = [str(Path(sys.executable).parent / "llm-comply"), "--format", "open-responses", "--timeout", "30"]
    flags = ["-u", f"{running_in_a_thread}/v1", "-k", "any", "-m", MODEL, "-i", "None is not of type 'number'"]
    run = subprocess.run([*command, *flags], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    passed = {line.split("(")[0].strip(" \u2713") for line in run.stdout.splitlines() if "\u2713" in line}
    wanted = {"Basic Text Response", "System Prompt", "Multi-turn Conversation", "Assistant Message Phase"}
    assert passed >= wanted | {"Streaming Response", "Streaming Usage"}, run.stdout

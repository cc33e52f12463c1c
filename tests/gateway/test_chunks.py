"""What the chunks of a chat say, and when: a role and calls as clients read them, once there is something to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from openai.lib.streaming.chat._completions import ChatCompletionStreamState  # type: ignore[import-untyped]
from openai.types.chat import ChatCompletionChunk

from gateway.answers import Answer
from gateway.bodies import ChatBody
from gateway.calls import Format
from gateway.tools import Parser
from specdec.v1 import generation_pb2

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "now")]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
CALLS: list[tuple[Format, str]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": %s}</tool_call>\n<tool_call>{"name": "now"}</tool_call>'),
    ("llama3_json", '{"name": "f", "parameters": %s}; {"name": "now"}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": %s}, {"name": "now"}]'),
    ("mistral", "[TOOL_CALLS]f[ARGS]%s[TOOL_CALLS]now[ARGS]{}"),
]
ARGUMENTS = '{"a": "x y", "b": [1, 2, 3], "c": {"d": null}}'


def answered(
    pieces: Sequence[str], parser: Parser, reason: int = generation_pb2.FINISH_REASON_STOP, **fields: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The chunks of an answer whose text comes in pieces, and the whole answer."""
    body = ChatBody.model_validate(BODY | fields)
    answer = Answer(body, 1, "request", "model", lambda: parser)
    assert not list(answer.chunks(0, generation_pb2.GenerateResponse(admission=generation_pb2.Admission())))
    chunks = []
    for piece in pieces:
        response = generation_pb2.GenerateResponse(chunk=generation_pb2.Chunk(text=piece))
        chunks += answer.chunks(0, response)
    last = generation_pb2.Chunk(finish=generation_pb2.Finish(reason=reason))  # type: ignore[arg-type]
    chunks += answer.chunks(0, generation_pb2.GenerateResponse(chunk=last))
    return chunks, answer.whole()


def deltas(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def test_the_role_comes_with_the_first_token() -> None:
    """Clients take the chunk with the role for it; a chunk is sent when there is something to say."""
    chunks, _ = answered(["", "a", "", "b"], Parser("hermes"))
    role, *texts, last = deltas(chunks)
    assert role == {"role": "assistant", "content": ""}
    assert texts == [{"content": "a"}, {"content": "b"}]
    assert not last["content"]
    chunks, _ = answered(["", "a"], Parser("hermes"), logprobs=True)
    assert len(chunks) == 4, "logprobs are something to say"


@pytest.mark.parametrize(("kind", "form"), CALLS)
def test_calls_are_streamed_by_name_and_then_in_pieces(kind: Format, form: str) -> None:
    chunks, whole = answered(form % ARGUMENTS, Parser(kind))
    calls = [delta["tool_calls"] for delta in deltas(chunks) if "tool_calls" in delta]
    assert {len(entries) for entries in calls} == {1}, "clients read one call of a delta"
    entries = [entry for [entry] in calls]
    named = [entry for entry in entries if "id" in entry]
    message = whole["choices"][0]["message"]
    assert [(entry["index"], entry["id"], entry["type"], entry["function"]) for entry in named] == [
        (index, call["id"], "function", {"name": call["function"]["name"], "arguments": ""})
        for index, call in enumerate(message["tool_calls"])
    ]
    pieces = [entry["function"]["arguments"] for entry in entries if entry["index"] == 0]
    assert len(pieces) > 10
    assert "".join(pieces) == ARGUMENTS == message["tool_calls"][0]["function"]["arguments"]
    assert (chunks[-1]["choices"][0]["finish_reason"], message["content"]) == ("tool_calls", None)
    assert followed(chunks) == [call["function"]["arguments"] for call in message["tool_calls"]]
    one, _ = answered(form % ARGUMENTS, Parser(kind), parallel_tool_calls=False)
    assert followed(one) == [ARGUMENTS]


def test_texts_and_calls_of_one_piece_are_chunks_of_their_own() -> None:
    text = f'Hm.<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>So.<tool_call>{{"name": "now"}}'
    chunks, whole = answered([text], Parser("hermes"))
    assert [sorted(delta) for delta in deltas(chunks)][1:-1] == [
        *(["content"], ["tool_calls"], ["tool_calls"], ["content"], ["tool_calls"], ["tool_calls"])
    ]
    assert followed(chunks) == [ARGUMENTS, "{}"]
    assert whole["choices"][0]["message"]["content"] == "Hm.So."


def test_forced_calls_are_streamed_and_a_cut_one_is_shown_as_it_is() -> None:
    named, _ = answered(ARGUMENTS, Parser(named="f"))
    listed, _ = answered(
        f'[{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]', Parser(listed=True)
    )
    for chunks, reason in ((named, "stop"), (listed, "tool_calls")):
        assert len([delta for delta in deltas(chunks) if "tool_calls" in delta]) > 10
        assert followed(chunks)[0] == ARGUMENTS
        assert chunks[-1]["choices"][0]["finish_reason"] == reason
    for parser, text in (
        (Parser(named="f"), '{\n\n"city"\n\n'),
        (Parser(listed=True), '[{"name": "f", "arguments": {"city"'),
    ):
        chunks, whole = answered(text, parser, generation_pb2.FINISH_REASON_LENGTH)
        [choice] = whole["choices"]
        assert followed(chunks) == [choice["message"]["tool_calls"][0]["function"]["arguments"]] == ['{"city"']
        assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"


def followed(chunks: Sequence[dict[str, Any]]) -> list[str]:
    """The arguments of the calls as OpenAI's client puts them together."""
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    calls = state.current_completion_snapshot.choices[0].message.tool_calls or ()
    return [call.function.arguments for call in calls]

"""LangChain's classes for OpenAI."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, equal

WEATHER = tool(scene.weather)


def chat(url: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, model=MODEL, **fields)


def loop(servers: Servers, **fields: Any) -> None:
    client = chat(servers.scripted, **fields).bind_tools([WEATHER])
    messages: list[Any] = [HumanMessage(scene.QUESTION)]
    for expected in ("", scene.CALLED_ANSWER, scene.SECOND_ANSWER):
        answer = client.invoke(messages)
        equal(answer.text, expected)
        messages.append(answer)
        messages += [WEATHER.invoke(call) for call in answer.tool_calls]
        if expected:
            messages.append(HumanMessage(scene.THANKS))


def tool_loop_and_second_turn(servers: Servers) -> None:
    loop(servers)


def responses(servers: Servers) -> None:
    scene.needs_responses(servers)
    loop(servers, use_responses_api=True)


def streams(servers: Servers) -> None:
    chunks: list[AIMessageChunk] = list(chat(servers.scripted).bind_tools([WEATHER]).stream(scene.QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    equal(whole.tool_calls[0]["args"], {"city": "Bern"})


def structured_output(servers: Servers) -> None:
    for method in ("json_schema", "function_calling"):
        client = chat(servers.demo, max_tokens=200).with_structured_output(scene.Order, method=method)
        assert isinstance(client.invoke(scene.ORDER), scene.Order)


def completions(servers: Servers) -> None:
    client = OpenAI(base_url=servers.demo, model=MODEL, temperature=0, max_tokens=24)
    expected = scene.completed(servers)
    equal(client.invoke(scene.PROMPT), expected)
    equal("".join(client.stream(scene.PROMPT)), expected)


if __name__ == "__main__":
    scene.run(
        "langchain-openai", tool_loop_and_second_turn, streams, structured_output, completions, responses
    )

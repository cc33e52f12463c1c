"""Haystack."""

from __future__ import annotations

from typing import Any

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, equal


def generator(url: str, **fields: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(model=MODEL, api_base_url=url, **fields)


def loop(servers: Servers, **fields: Any) -> None:
    agent = Agent(
        chat_generator=generator(servers.scripted, **fields), tools=[create_tool_from_function(scene.weather)]
    )
    messages = [ChatMessage.from_user(scene.QUESTION)]
    for expected in (scene.CALLED_ANSWER, scene.SECOND_ANSWER):
        messages = agent.run(messages=messages)["messages"]
        equal(messages[-1].text, expected)
        messages.append(ChatMessage.from_user(scene.THANKS))


def tool_loop_and_second_turn(servers: Servers) -> None:
    loop(servers)


def streams(servers: Servers) -> None:
    pieces = []
    loop(servers, streaming_callback=pieces.append)
    assert len(pieces) > 2


def structured_output(servers: Servers) -> None:
    settings = {"max_completion_tokens": 200, "response_format": scene.Order}
    answer = generator(servers.demo, generation_kwargs=settings).run([ChatMessage.from_user(scene.ORDER)])
    scene.Order.model_validate_json(answer["replies"][0].text)


if __name__ == "__main__":
    scene.run("haystack-ai", tool_loop_and_second_turn, streams, structured_output)

"""Pydantic AI."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, equal


def agent(url: str, model: Any = OpenAIChatModel, **fields: Any) -> Agent[None, Any]:
    return Agent(model(MODEL, provider=OpenAIProvider(base_url=url)), **fields)


def loop(weatherman: Agent[None, Any]) -> None:
    result = weatherman.run_sync(scene.QUESTION)
    equal(result.output, scene.CALLED_ANSWER)
    second = weatherman.run_sync(scene.THANKS, message_history=result.all_messages())
    equal(second.output, scene.SECOND_ANSWER)


def tool_loop_and_second_turn(servers: Servers) -> None:
    loop(agent(servers.scripted, tools=[scene.weather]))


def responses(servers: Servers) -> None:
    scene.needs_responses(servers)
    loop(agent(servers.scripted, OpenAIResponsesModel, tools=[scene.weather]))


def streams(servers: Servers) -> None:
    async def run() -> None:
        async with agent(servers.scripted, tools=[scene.weather]).run_stream(scene.QUESTION) as result:
            equal([text async for text in result.stream_text()][-1], scene.CALLED_ANSWER)

    asyncio.run(run())


def structured_output(servers: Servers) -> None:
    for output in (NativeOutput(scene.Order), ToolOutput(scene.Order)):
        clerk = agent(servers.demo, output_type=output, model_settings={"max_tokens": 200, "temperature": 0})
        assert isinstance(clerk.run_sync(scene.ORDER).output, scene.Order)


if __name__ == "__main__":
    scene.run("pydantic-ai-slim", tool_loop_and_second_turn, streams, structured_output, responses)

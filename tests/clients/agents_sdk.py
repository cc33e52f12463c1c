"""OpenAI's Agents SDK: chat completions, and its default, responses."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
from openai import AsyncOpenAI

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, equal


def agent(url: str, model: Any = agents.OpenAIChatCompletionsModel, **fields: Any) -> agents.Agent:
    client = AsyncOpenAI(base_url=url, max_retries=0)
    return agents.Agent("weatherman", model=model(MODEL, client), **fields)


def loop(weatherman: agents.Agent) -> None:
    result = agents.Runner.run_sync(weatherman, scene.QUESTION)
    equal(result.final_output, scene.CALLED_ANSWER)
    history: list[Any] = [*result.to_input_list(), {"role": "user", "content": scene.THANKS}]
    equal(agents.Runner.run_sync(weatherman, history).final_output, scene.SECOND_ANSWER)


def streamed(weatherman: agents.Agent) -> None:
    async def run() -> None:
        result = agents.Runner.run_streamed(weatherman, scene.QUESTION)
        async for _ in result.stream_events():
            pass
        equal(result.final_output, scene.CALLED_ANSWER)

    asyncio.run(run())


def tool_loop_and_second_turn(servers: Servers) -> None:
    loop(agent(servers.scripted, tools=[agents.function_tool(scene.weather)]))


def streams(servers: Servers) -> None:
    streamed(agent(servers.scripted, tools=[agents.function_tool(scene.weather)]))


def structured_output(servers: Servers) -> None:
    settings = agents.ModelSettings(max_tokens=200)
    clerk = agent(servers.demo, output_type=scene.Order, model_settings=settings)
    assert isinstance(agents.Runner.run_sync(clerk, scene.ORDER).final_output, scene.Order)


def responses(servers: Servers) -> None:
    scene.needs_responses(servers)
    weatherman = agent(servers.scripted, agents.OpenAIResponsesModel, tools=[agents.function_tool(scene.weather)])
    loop(weatherman)
    streamed(weatherman)


if __name__ == "__main__":
    agents.set_tracing_disabled(True)
    scene.run("openai-agents", tool_loop_and_second_turn, streams, structured_output, responses)

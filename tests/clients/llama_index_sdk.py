"""LlamaIndex's class for servers like OpenAI's."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, equal


def client(url: str, **fields: Any) -> OpenAILike:
    return OpenAILike(model=MODEL, api_base=url, api_key="any", **fields)


def loop(servers: Servers, streaming: bool) -> None:
    async def run() -> None:
        llm = client(servers.scripted, is_chat_model=True, is_function_calling_model=True)
        agent = FunctionAgent(tools=[FunctionTool.from_defaults(scene.weather)], llm=llm, streaming=streaming)
        memory = ChatMemoryBuffer.from_defaults(token_limit=4000)
        equal(str(await agent.run(scene.QUESTION, memory=memory)), scene.CALLED_ANSWER)
        equal(str(await agent.run(scene.THANKS, memory=memory)), scene.SECOND_ANSWER)

    asyncio.run(run())


def tool_loop_and_second_turn(servers: Servers) -> None:
    loop(servers, streaming=False)


def streams(servers: Servers) -> None:
    loop(servers, streaming=True)


def structured_output(servers: Servers) -> None:
    llm = client(servers.demo, is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    answer = llm.as_structured_llm(scene.Order).chat([ChatMessage(scene.ORDER)])
    assert isinstance(answer.raw, scene.Order)


def completions(servers: Servers) -> None:
    llm = client(servers.demo, temperature=0, max_tokens=24, is_chat_model=False)
    expected = scene.completed(servers)
    equal(llm.complete(scene.PROMPT).text, expected)
    equal("".join(part.delta or "" for part in llm.stream_complete(scene.PROMPT)), expected)


if __name__ == "__main__":
    scene.run(
        "llama-index-llms-openai-like", tool_loop_and_second_turn, streams, structured_output, completions
    )

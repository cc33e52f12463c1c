"""Clients and frameworks in Python. Each function imports its own, in an environment that has it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, check, equal

FORCED: dict[str, Any] = {"messages": [scene.user(scene.ORDER)], "max_tokens": 200}
ASKED: dict[str, Any] = {"messages": [scene.user(scene.QUESTION)], "tools": [scene.TOOL]}


def openai(servers: Servers) -> None:
    from openai import OpenAI

    scripted, demo = (OpenAI(base_url=url, max_retries=0) for url in (servers.scripted, servers.demo))
    with check(scene.LOOP):
        create = scripted.chat.completions.create
        scene.converse(lambda messages: create(**ASKED | {"model": MODEL, "messages": messages}).choices[0].message)
    with check("streams"):
        with scripted.chat.completions.stream(model=MODEL, **ASKED) as events:
            [call] = events.get_final_completion().choices[0].message.tool_calls or ()
        equal(json.loads(call.function.arguments), scene.ARGUMENTS)
        request = {"model": MODEL, "prompt": scene.PROMPT, "max_tokens": 24, "temperature": 0}
        chunks = demo.completions.create(**request, stream=True)
        equal("".join(chunk.choices[0].text for chunk in chunks), servers.completed())
    with check("structured output"):
        answer = demo.chat.completions.parse(model=MODEL, response_format=scene.Order, **FORCED)
        assert isinstance(answer.choices[0].message.parsed, scene.Order)
    with check("responses"):
        servers.need_responses()
        openai_responses(scripted)


def openai_responses(client: Any) -> None:
    tools = [{"type": "function", "strict": False, **scene.TOOL["function"]}]
    items = [scene.user(scene.QUESTION)]
    for expected in ("", scene.CALLED_ANSWER, scene.SECOND_ANSWER):
        with client.responses.stream(model=MODEL, input=items, tools=tools) as events:
            streamed = events.get_final_response()
        answer = client.responses.create(model=MODEL, input=items, tools=tools, store=False)
        equal([answer.output_text, streamed.output_text], [expected, expected])
        items += answer.output
        for call in (item for item in answer.output if item.type == "function_call"):
            output = scene.weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        if expected:
            items.append(scene.user(scene.THANKS))


def litellm(servers: Servers) -> None:
    """By both names that it has for servers like this one."""
    from litellm import ContextWindowExceededError, completion, responses, stream_chunk_builder

    for provider in ("openai", "hosted_vllm"):
        scripted, demo = (
            {"model": f"{provider}/{MODEL}", "api_base": url, "api_key": "any"}
            for url in (servers.scripted, servers.demo)
        )
        with check(f"{provider}/: {scene.LOOP}"):
            scene.converse(
                lambda messages, at=scripted: completion(**at, **ASKED | {"messages": messages}).choices[0].message
            )
        with check(f"{provider}/: streams"):
            message = stream_chunk_builder(list(completion(**scripted, **ASKED, stream=True))).choices[0].message
            equal(json.loads(message.tool_calls[0].function.arguments), scene.ARGUMENTS)
        with check(f"{provider}/: structured output"):
            answer = completion(**demo, **FORCED, response_format=scene.Order)
            scene.Order.model_validate_json(answer.choices[0].message.content)
        with check(f"{provider}/: overflow"):
            try:
                completion(**demo, **FORCED | {"max_tokens": 100_000})
                raise AssertionError("no error")
            except ContextWindowExceededError:
                pass
    with check("responses"):
        servers.need_responses()
        answer = responses(model=f"openai/{MODEL}", input=scene.THANKS, api_base=servers.scripted, api_key="any")
        equal(answer.output[-1].content[0].text, "You asked 1 times.")


def langchain(servers: Servers) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    weather = tool(scene.weather)

    def converse(**fields: Any) -> None:
        client = ChatOpenAI(base_url=servers.scripted, model=MODEL, **fields).bind_tools([weather])
        messages: list[Any] = [HumanMessage(scene.QUESTION)]
        for expected in ("", scene.CALLED_ANSWER, scene.SECOND_ANSWER):
            chunks = list(client.stream(messages))
            equal(sum(chunks[1:], chunks[0]).text, expected)
            answer = client.invoke(messages)
            equal(answer.text, expected)
            messages += [answer, *(weather.invoke(call) for call in answer.tool_calls)]
            if expected:
                messages.append(HumanMessage(scene.THANKS))

    with check(scene.LOOP):
        converse()
    for method in ("json_schema", "function_calling"):
        with check(f"structured output, {method}"):
            client = ChatOpenAI(base_url=servers.demo, model=MODEL, max_tokens=200)
            answer = client.with_structured_output(scene.Order, method=method).invoke(scene.ORDER)
            assert isinstance(answer, scene.Order)
    with check("completions"):
        completing = OpenAI(base_url=servers.demo, model=MODEL, temperature=0, max_tokens=24)
        texts = [completing.invoke(scene.PROMPT), "".join(completing.stream(scene.PROMPT))]
        equal(texts, [servers.completed()] * 2)
    with check("responses"):
        servers.need_responses()
        converse(use_responses_api=True)


def openai_agents(servers: Servers) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    def agent(url: str, model: Any, **fields: Any) -> agents.Agent:
        return agents.Agent("weatherman", model=model(MODEL, AsyncOpenAI(base_url=url)), **fields)

    async def converse(model: Any) -> None:
        weatherman = agent(servers.scripted, model, tools=[agents.function_tool(scene.weather)])
        result = agents.Runner.run_streamed(weatherman, scene.QUESTION)
        async for _ in result.stream_events():
            pass
        equal(result.final_output, scene.CALLED_ANSWER)
        result = await agents.Runner.run(weatherman, scene.QUESTION)
        equal(result.final_output, scene.CALLED_ANSWER)
        history: list[Any] = [*result.to_input_list(), scene.user(scene.THANKS)]
        equal((await agents.Runner.run(weatherman, history)).final_output, scene.SECOND_ANSWER)

    with check(scene.LOOP):
        asyncio.run(converse(agents.OpenAIChatCompletionsModel))
    with check("structured output"):
        settings = agents.ModelSettings(max_tokens=200)
        chat = agents.OpenAIChatCompletionsModel
        clerk = agent(servers.demo, chat, output_type=scene.Order, model_settings=settings)
        assert isinstance(agents.Runner.run_sync(clerk, scene.ORDER).final_output, scene.Order)
    with check("responses"):
        servers.need_responses()
        asyncio.run(converse(agents.OpenAIResponsesModel))


def pydantic_ai(servers: Servers) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def converse(model: Any) -> None:
        at = OpenAIProvider(base_url=servers.scripted)
        weatherman: Any = Agent(model(MODEL, provider=at), tools=[scene.weather])
        async with weatherman.run_stream(scene.QUESTION) as streamed:
            equal([text async for text in streamed.stream_text()][-1], scene.CALLED_ANSWER)
        result = await weatherman.run(scene.QUESTION)
        equal(result.output, scene.CALLED_ANSWER)
        second = await weatherman.run(scene.THANKS, message_history=result.all_messages())
        equal(second.output, scene.SECOND_ANSWER)

    with check(scene.LOOP):
        asyncio.run(converse(OpenAIChatModel))
    for output in (NativeOutput(scene.Order), ToolOutput(scene.Order)):
        with check(f"structured output, {type(output).__name__}"):
            model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=servers.demo))
            clerk: Any = Agent(model, output_type=output, model_settings={"max_tokens": 200})
            assert isinstance(clerk.run_sync(scene.ORDER).output, scene.Order)
    with check("responses"):
        servers.need_responses()
        asyncio.run(converse(OpenAIResponsesModel))


def instructor(servers: Servers) -> None:
    from instructor import Mode, from_openai
    from openai import OpenAI

    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
        client = from_openai(OpenAI(base_url=servers.demo), mode=mode)
        request = {"model": MODEL, "response_model": scene.Order, "max_retries": 1, **FORCED}
        with check(f"structured output, {mode.value}"):
            assert isinstance(client.create(**request), scene.Order)
            parts = list(client.create_partial(**request))
            assert len(parts) > 1, "a stream in one piece"
            scene.Order.model_validate(parts[-1].model_dump())


def llama_index(servers: Servers) -> None:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.core.memory import ChatMemoryBuffer
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    settings: Any = {"model": MODEL, "api_key": "any", "is_function_calling_model": True, "is_chat_model": True}

    async def converse(streaming: bool) -> None:
        llm = OpenAILike(api_base=servers.scripted, **settings)
        agent = FunctionAgent(tools=[FunctionTool.from_defaults(scene.weather)], llm=llm, streaming=streaming)
        memory = ChatMemoryBuffer.from_defaults(token_limit=4000)
        equal(str(await agent.run(scene.QUESTION, memory=memory)), scene.CALLED_ANSWER)
        equal(str(await agent.run(scene.THANKS, memory=memory)), scene.SECOND_ANSWER)

    with check(scene.LOOP):
        asyncio.run(converse(streaming=False))
        asyncio.run(converse(streaming=True))
    with check("structured output"):
        clerk = OpenAILike(api_base=servers.demo, max_tokens=200, **settings).as_structured_llm(scene.Order)
        assert isinstance(clerk.chat([ChatMessage(scene.ORDER)]).raw, scene.Order)
    with check("completions"):
        llm = OpenAILike(model=MODEL, api_base=servers.demo, api_key="any", temperature=0, max_tokens=24)
        streamed = "".join(part.delta or "" for part in llm.stream_complete(scene.PROMPT))
        equal([llm.complete(scene.PROMPT).text, streamed], [servers.completed()] * 2)


def haystack(servers: Servers) -> None:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function

    pieces: list[Any] = []
    for callback in (None, pieces.append):
        with check(scene.LOOP + (", streamed" if callback else "")):
            at: Any = {"model": MODEL, "api_base_url": servers.scripted, "streaming_callback": callback}
            agent = Agent(chat_generator=OpenAIChatGenerator(**at), tools=[create_tool_from_function(scene.weather)])
            messages = [ChatMessage.from_user(scene.QUESTION)]
            for expected in (scene.CALLED_ANSWER, scene.SECOND_ANSWER):
                messages = agent.run(messages=messages)["messages"]
                equal(messages[-1].text, expected)
                messages.append(ChatMessage.from_user(scene.THANKS))
            assert bool(pieces) == bool(callback)
    with check("structured output"):
        clerk = OpenAIChatGenerator(model=MODEL, api_base_url=servers.demo)
        settings = {"max_completion_tokens": 200, "response_format": scene.Order}
        answer = clerk.run([ChatMessage.from_user(scene.ORDER)], generation_kwargs=settings)
        scene.Order.model_validate_json(answer["replies"][0].text)

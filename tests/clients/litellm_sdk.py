"""LiteLLM, under both names that it has for servers like this one."""

from __future__ import annotations

import json
from typing import Any

import litellm

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, equal

PREFIXES = ("openai/", "hosted_vllm/")
USER = {"role": "user", "content": scene.QUESTION}


def completion(url: str, prefix: str, **fields: Any) -> Any:
    return litellm.completion(model=prefix + MODEL, api_base=url, api_key="any", **fields)


def tool_loop_and_second_turn(servers: Servers) -> None:
    for prefix in PREFIXES:
        messages: list[Any] = [USER]
        for expected in ("", scene.CALLED_ANSWER, scene.SECOND_ANSWER):
            answer = completion(servers.scripted, prefix, messages=messages, tools=[scene.TOOL])
            message = answer.choices[0].message
            equal(message.content or "", expected)
            assert message.reasoning_content, "without its reasoning"
            messages.append(message)
            for call in message.tool_calls or ():
                content = scene.weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            if expected:
                messages.append({"role": "user", "content": scene.THANKS})


def streams(servers: Servers) -> None:
    for prefix in PREFIXES:
        chunks = list(completion(servers.scripted, prefix, messages=[USER], tools=[scene.TOOL], stream=True))
        message = litellm.stream_chunk_builder(chunks).choices[0].message
        equal(json.loads(message.tool_calls[0].function.arguments), {"city": "Bern"})
        assert message.reasoning_content, "without its reasoning"


def structured_output(servers: Servers) -> None:
    request = {"messages": [{"role": "user", "content": scene.ORDER}], "max_tokens": 200}
    for prefix in PREFIXES:
        answer = completion(servers.demo, prefix, **request, response_format=scene.Order)
        scene.Order.model_validate_json(answer.choices[0].message.content)


def overflow_is_recognised(servers: Servers) -> None:
    for prefix in PREFIXES:
        try:
            completion(servers.demo, prefix, messages=[USER], max_tokens=100_000)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError("no ContextWindowExceededError")


def responses(servers: Servers) -> None:
    scene.needs_responses(servers)
    answer = litellm.responses(model=f"openai/{MODEL}", input=scene.THANKS, api_base=servers.scripted, api_key="any")
    equal(answer.output_text, scene.SECOND_ANSWER.replace("2", "1"))


if __name__ == "__main__":
    scene.run("litellm", tool_loop_and_second_turn, streams, structured_output, overflow_is_recognised, responses)

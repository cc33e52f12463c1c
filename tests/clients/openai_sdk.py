"""OpenAI's client, in its majors 1 and 3."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

from tests.clients import scene
from tests.clients.scene import MODEL, Servers, equal

USER: Any = {"role": "user", "content": scene.QUESTION}


def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, max_retries=0)


def tool_loop_and_second_turn(servers: Servers) -> None:
    completions = client(servers.scripted).chat.completions
    messages = [USER]
    for expected in ("", scene.CALLED_ANSWER, scene.SECOND_ANSWER):
        message = completions.create(model=MODEL, messages=messages, tools=[scene.TOOL]).choices[0].message
        equal(message.content or "", expected)
        assert message.to_dict()["reasoning"], "without its reasoning"
        messages.append(message.to_dict())
        for call in message.tool_calls or ():
            content = scene.weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if not message.tool_calls:
            messages.append({"role": "user", "content": scene.THANKS})


def streams(servers: Servers) -> None:
    request = {"model": MODEL, "messages": [USER], "tools": [scene.TOOL]}
    with client(servers.scripted).chat.completions.stream(**request) as events:
        [call] = events.get_final_completion().choices[0].message.tool_calls or ()
    equal(json.loads(call.function.arguments), {"city": "Bern"})
    request = {"model": MODEL, "prompt": scene.PROMPT, "max_tokens": 24, "temperature": 0, "stream": True}
    chunks = client(servers.demo).completions.create(**request)
    equal("".join(chunk.choices[0].text for chunk in chunks), scene.completed(servers))


def structured_output(servers: Servers) -> None:
    request = {"model": MODEL, "messages": [{"role": "user", "content": scene.ORDER}], "max_tokens": 200}
    answer = client(servers.demo).chat.completions.parse(**request, response_format=scene.Order)
    assert isinstance(answer.choices[0].message.parsed, scene.Order)


def responses(servers: Servers) -> None:
    scene.needs_responses(servers)
    create = client(servers.scripted).responses.create
    tool = {"type": "function", **scene.TOOL["function"], "strict": False}
    items: list[Any] = [USER]
    for expected in ("", scene.CALLED_ANSWER, scene.SECOND_ANSWER):
        answer = create(model=MODEL, input=items, tools=[tool], store=False)
        equal(answer.output_text, expected)
        items += answer.output
        for call in (item for item in answer.output if item.type == "function_call"):
            output = scene.weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        if expected:
            items.append({"role": "user", "content": scene.THANKS})
    with client(servers.scripted).responses.stream(model=MODEL, input=[USER], tools=[tool]) as events:
        [call] = [item for item in events.get_final_response().output if item.type == "function_call"]
    equal(json.loads(call.arguments), {"city": "Bern"})


if __name__ == "__main__":
    scene.run("openai", tool_loop_and_second_turn, streams, structured_output, responses)

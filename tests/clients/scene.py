"""What every client is asked, the answers that are right, and how checks are named and reported.

Needs nothing but pydantic: it is imported in the environments of the clients.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pydantic

MODEL = "target"
PROMPT = "def add(first, second):\n    return first + second\n\n\ndef subtract("
QUESTION = "How is the weather in Bern?"
CALLED_ANSWER = "It is 21 degrees in Bern."
THANKS = "Thanks."
SECOND_ANSWER = "You asked 2 times."
ORDER = "An order of 3, by express."
LOOP = "tool loop and second turn"
ARGUMENTS = {"city": "Bern"}


def weather(city: str) -> str:
    """The weather of a city."""
    return f"21 degrees in {city}"


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


class Order(pydantic.BaseModel):
    """An order."""

    count: int = pydantic.Field(ge=0, le=99)
    express: bool


@dataclass(frozen=True)
class Servers:
    """Base URLs, which end with /v1: of ``specdec up`` with the demo pair, and of the scripted target."""

    demo: str
    scripted: str

    def as_json(self) -> str:
        """With all that clients in JavaScript need, for the variable SCENE."""
        texts = {"question": QUESTION, "called_answer": CALLED_ANSWER, "second_answer": SECOND_ANSWER}
        return json.dumps(asdict(self) | texts | {"thanks": THANKS, "model": MODEL, "tool": TOOL, "order": ORDER})

    def completed(self) -> str:
        """The greedy text that follows PROMPT."""
        answer = posted(f"{self.demo}/completions", model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
        text: str = answer["choices"][0]["text"]
        return text

    def need_responses(self) -> None:
        """Raises Skipped if they have no /v1/responses."""
        try:
            posted(f"{self.scripted}/responses", model=MODEL, input="Hello.")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise Skipped("the server answers 404 to /v1/responses") from None


class Skipped(Exception):
    """A check that cannot run here. The message says why."""


def posted(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def equal(actual: object, expected: object) -> None:
    if actual != expected:
        raise AssertionError(f"{actual!r} instead of {expected!r}")


def user(content: str) -> Any:
    return {"role": "user", "content": content}


def converse(ask: Callable[[list[Any]], Any]) -> None:
    """A call, the answer by its result, and a second turn. ``ask`` gives the client's message, which is sent back."""
    messages = [user(QUESTION)]
    for expected in ("", CALLED_ANSWER, SECOND_ANSWER):
        message = ask(messages)
        equal(message.content or "", expected)
        assert message.reasoning_content, "without its reasoning"
        messages.append(message)
        for call in message.tool_calls or ():
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if expected:
            messages.append(user(THANKS))


@contextlib.contextmanager
def check(name: str) -> Iterator[list[str]]:
    """Prints the result of its body, with the figures that this adds to the list. Other checks follow a failure."""
    figures: list[str] = []
    try:
        yield figures
        result = ": ".join(["ok", *figures])
    except Skipped as reason:
        result = f"skipped: {reason}"
    except Exception as error:
        result = f"failed: {type(error).__name__}: {error}".replace("\n", " ")
    print(f"{name}\t{result}", flush=True)


def run(package: str, ask: Callable[[Servers], None]) -> None:
    """The program of a client's process."""
    scene = json.loads(os.environ["SCENE"])
    print(f"version\t{importlib.metadata.version(package)}")
    ask(Servers(scene["demo"], scene["scripted"]))

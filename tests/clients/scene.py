"""What every client is asked, the answers that are right, and how its checks run. Needs nothing but pydantic, because it
is imported in the environments of the clients.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
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


def weather(city: str) -> str:
    """The weather of a city."""
    return f"21 degrees in {city}"


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": weather.__doc__,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Order(pydantic.BaseModel):
    """An order."""

    count: int = pydantic.Field(ge=0, le=99)
    express: bool


@dataclass(frozen=True)
class Servers:
    """Base URLs, which end with /v1: of ``specdec up`` with the demo pair, and of the scripted target."""

    demo: str
    scripted: str


Check = Callable[[Servers], str | None]
"""What a client can do. It may return figures."""


class Skipped(Exception):
    """A check that cannot run here. The message says why."""


def equal(actual: object, expected: object) -> None:
    if actual != expected:
        raise AssertionError(f"{actual!r} instead of {expected!r}")


def posted(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def completed(servers: Servers) -> str:
    """The greedy text that follows PROMPT."""
    answer = posted(f"{servers.demo}/completions", model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    text: str = answer["choices"][0]["text"]
    return text


def needs_responses(servers: Servers) -> None:
    """Raises Skipped where the server has no /v1/responses."""
    try:
        posted(f"{servers.scripted}/responses", model=MODEL, input="Hello.")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise Skipped("the server answers 404 to /v1/responses") from None


def as_json(servers: Servers) -> str:
    """For clients, in their variable SCENE."""
    texts = {"question": QUESTION, "called_answer": CALLED_ANSWER, "second_answer": SECOND_ANSWER, "thanks": THANKS}
    return json.dumps({**asdict(servers), **texts, "model": MODEL, "tool": TOOL, "order": ORDER})


def run(package: str, *checks: Check) -> None:
    """The main function of a client's module: prints its version and a line for each check."""
    scene = json.loads(os.environ["SCENE"])
    servers = Servers(scene["demo"], scene["scripted"])
    print(f"version\t{importlib.metadata.version(package)}")
    for check in checks:
        name = check.__name__.replace("_", " ")
        try:
            figures = check(servers)
            print(f"{name}\tok" + (f": {figures}" if figures else ""))
        except Skipped as reason:
            print(f"{name}\tskipped: {reason}")
        except Exception as error:
            print(f"{name}\tfailed: {type(error).__name__}: {error}".replace("\n", " "))

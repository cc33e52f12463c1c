"""Sends well-formed and broken requests with hostile contents over HTTP and gRPC, and counts the statuses. Knows the
fields of both APIs; does not know what the contents do.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
from google.rpc import code_pb2

from bench.chaos.hostile_grammars import FORMS, MOST_CHARACTERS
from gateway.bodies import ChatBody, CompletionBody, Generation
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.v1 import generation_pb2

_CONCURRENCY, _PATIENCE_S, _MOST_BAD = 6, 20.0, 24
_BAD = {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "500", "502", "503", "504", "connection lost"}

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_MESSAGES = [{"role": "user", "content": "a"}]
_WILD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**64,
    1e308,
    10**400,
    "",
    "\ud800",
    "\0" * 5000,
    [],
    [[]],
    {},
    {"": {}},
    [None],
    "9" * 5000,
)


class Attack:
    """``bad``: requests with a status that no contents may cause. After some it ends, and when a service is lost: one
    of the contents ``under_way`` is the cause."""

    def __init__(self, client: Client, http: httpx.AsyncClient, chance: random.Random) -> None:
        self.statuses: Counter[str] = Counter()
        self.bad: list[str] = []
        self.under_way: dict[int, str] = {}
        self._client, self._http, self._chance = client, http, chance

    async def run(self, count: int, stopped: Callable[[], bool]) -> None:
        numbers = iter(range(count))

        async def each() -> None:
            for number in numbers:
                if stopped() or len(self.bad) >= _MOST_BAD:
                    return
                send, *contents = self._any()
                self.under_way[number] = repr(contents)[:300]
                status = await send(*contents)
                self.statuses[status] += 1
                if status.split(":")[0] in _BAD:
                    self.bad.append(f"{status[:200]} for {self.under_way[number]}")
                if not stopped():
                    del self.under_way[number]

        await asyncio.gather(*(each() for _ in range(_CONCURRENCY)))

    def _any(self) -> tuple[Any, ...]:
        kind = self._chance.random()
        if kind < 0.35:
            return self._over_grpc, grammar_fields(self._chance)
        if kind < 0.4:
            return self._over_grpc, chat_fields(self._chance)
        if kind < 0.65:
            path, body = structured(self._chance)
            return self._over_http, path, json.dumps(body).encode()
        return self._over_http, *broken(self._chance)

    async def _over_grpc(self, fields: dict[str, Any]) -> str:
        try:
            async for _ in self._client.stream(_PATIENCE_S, **fields):
                pass
        except SpecdecError as error:
            name = code_pb2.Code.Name(error.code)
            return f"{name}: {error}" if name in _BAD else name
        except (ValueError, TypeError):
            return "no message"  # a text that no message can hold
        return "OK"

    async def _over_http(self, path: str, body: bytes) -> str:
        try:
            response = await self._http.post(path, content=body, headers={"content-type": "application/json"})
        except httpx.TimeoutException:
            return "504"
        except httpx.HTTPError:
            return "connection lost"
        status = str(response.status_code)
        return f"{status}: {response.text}" if status in _BAD else status


def grammar_fields(chance: random.Random) -> dict[str, Any]:
    """Of a GenerateRequest with a grammar, in some with an output so far to which it is applied."""
    form = chance.choice(list(FORMS))
    contents = FORMS[form](chance)
    fields = {form: contents[:MOST_CHARACTERS], "text": "a", "max_tokens": chance.choice((1, 8, 40)), "seed": 1}
    if chance.random() < 0.2:
        fields |= {"resume": {0: generation_pb2.TokenIds(token_ids=[66] * chance.choice((1, 30)))}}
    if chance.random() < 0.2:
        fields |= {"n": chance.choice((2, 16)), "prediction": "ab" * 500}
    return fields


def chat_fields(chance: random.Random) -> dict[str, Any]:
    chat: dict[str, Any] = {"messages": _MESSAGES, "template_kwargs_json": _nested(chance)}
    if chance.random() < 0.5:
        chat["tools_json"] = f"[{_nested(chance)}]"
    return {"chat": chat, "max_tokens": 4}


def structured(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A body with a grammar at one of the places where it can have one."""
    form = chance.choice(list(FORMS))
    contents = FORMS[form](chance)
    schema = _as_object(contents) if form == "json_schema" else None
    body: dict[str, Any] = {"max_tokens": chance.choice((1, 8)), "stream": chance.random() < 0.3}
    place = chance.random()
    if schema is None or place < 0.3:
        name = {"json_schema": "json", "choices": "choice"}.get(form, form)
        body["structured_outputs"] = {name: contents[:MOST_CHARACTERS]}
        return _COMPLETIONS, {"prompt": "a", **body}
    body["messages"] = _MESSAGES
    if place < 0.6:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    else:
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        body["tool_choice"] = chance.choice(("required", {"type": "function", "function": {"name": "f"}}, "auto"))
    return _CHAT, body


def _as_object(text: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return None


def _nested(chance: random.Random) -> str:
    depth = chance.choice((3, 90, 400, 3000, 40_000))
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}"), ('[1,{"b":', "}]")))
    return f'{{"a": {opening * depth}0{closing * depth}}}'


def broken(chance: random.Random) -> tuple[str, bytes]:
    """A body with values of wrong types, deep or wide ones, names that occur twice, or no JSON at all."""
    path = chance.choice((_COMPLETIONS, _CHAT))
    kind: type[Generation] = CompletionBody if path == _COMPLETIONS else ChatBody
    body: dict[str, Any] = {"prompt": "a"} if path == _COMPLETIONS else {"messages": _MESSAGES}
    names = sorted(kind.model_fields)
    for name in chance.sample(names, chance.choice((0, 1, 1, 3))):
        # Without a number of tokens the answer would be as long as the context.
        body[name] = chance.choice(_WILD[1:] if name in ("max_tokens", "max_completion_tokens") else _WILD)
    size = chance.choice((10, 1000, 30_000))
    wide: dict[str, Any] = {
        "metadata": {str(n): n for n in range(size)},
        "stop": ["a"] * size,
        "bad_words": ["é"] * size,
    }
    wide |= {"logit_bias": {str(n): 1 for n in range(size)}, "prompt": [1] * size, "messages": _MESSAGES * size}
    name = chance.choice([each for each in wide if each in names])
    few, deep = json.dumps({"max_tokens": 4, **body}), _nested(chance)
    texts = [
        few,
        json.dumps({**body, name: wide[name], "max_tokens": 4}),
        f'{{"{chance.choice(names)}": {deep}, {few[1:]}',
        f'{{"chat_template_kwargs": {deep}, {few[1:]}',
        few[:-1] + ', "prompt": 1, "prompt": "a", "max_tokens": 2}',
    ]
    data = chance.choice(texts).encode()
    if chance.random() < 0.15:
        data = data[: chance.randrange(len(data))] + chance.randbytes(chance.randint(0, 20))
    return path, data

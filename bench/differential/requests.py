"""Draws requests of both APIs with random options. Knows which options go together; does not know answers."""

from __future__ import annotations

import json
import random
from typing import Any, Literal, NamedTuple

Api = Literal["gRPC", "HTTP"]

_PROMPTS = (
    "def add(first, second):\n    return first + second\n\n\ndef subtract(",
    "x = 1\n" * 20,
    'print("é \U0001f600 \u202e',
    "a",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):\n",
)
_NOT_WITH_GRAMMARS = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words")


class Asked(NamedTuple):
    """``fields``: of GenerateRequest, or of the body for ``path``. Without a number of draft tokens."""

    api: Api
    path: str
    fields: dict[str, Any]


def draw(chance: random.Random) -> Asked:
    fields = _options(chance)
    if chance.random() < 0.4:
        fields = {name: value for name, value in fields.items() if name not in _NOT_WITH_GRAMMARS}
        form, text = _grammar(chance)
    else:
        form, text = "", None
    if chance.random() < 0.5:
        return Asked("gRPC", "", _as_grpc(fields, chance) | ({form: text} if form else {}))
    chat = chance.random() < 0.5
    body = _as_chat(fields, chance) if chat else _as_completion(fields, chance)
    schema = json.loads(text) if form == "json_schema" else None
    if chat and schema and chance.random() < 0.6:
        body |= _with_schema(schema, chance)
    elif form:
        name = {"json_schema": "json", "choices": "choice"}.get(form, form)
        body["structured_outputs"] = {name: schema or text}
    return Asked("HTTP", "/v1/chat/completions" if chat else "/v1/completions", body)


def _options(chance: random.Random) -> dict[str, Any]:
    """Those that both APIs name alike."""
    ids = chance.sample(range(1, 4000), 40)
    verification = chance.choice(("coupled", "coupled", "token", "block"))
    # The text of the other two depends on the draft tokens, unless it is greedy.
    temperature = chance.choice((0.0, 0.6, 1.0, 1.7)) if verification == "coupled" else 0.0
    some: dict[str, Any] = {
        "top_p": chance.uniform(0.3, 1.0),
        "top_k": chance.choice((1, 5, 200)),
        "min_p": chance.uniform(0.0, 0.2),
        "presence_penalty": chance.uniform(-2, 2),
        "frequency_penalty": chance.uniform(-2, 2),
        "repetition_penalty": chance.uniform(0.5, 2),
        "min_tokens": chance.randint(1, 8),
        "stop": chance.sample(("return", "\n\n", "self", " x", "é", ")", "e"), chance.randint(1, 3)),
        "stop_token_ids": ids[:9],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "add_special_tokens": chance.random() < 0.5,
        "truncate_prompt_tokens": chance.randint(1, 9),
        "prompt_logprobs": chance.randint(0, 3),
        "allowed_token_ids": sorted(chance.sample(range(1, 4000), 1500)),
        "bad_words": chance.sample(("self", "return", "def", "x", "first"), 2),
        "n": chance.randint(1, 3),
    }
    kept = chance.sample(list(some), chance.choice((0, 1, 2, 4)))
    fixed = {"max_tokens": chance.choice((1, 8, 32)), "seed": chance.getrandbits(40), "temperature": temperature}
    return {name: some[name] for name in kept} | fixed | {"verification": verification}


def _grammar(chance: random.Random) -> tuple[str, Any]:
    kind = chance.choice(("json_schema", "json_schema", "regex", "grammar", "choices"))
    if kind == "json_schema":
        return kind, json.dumps({**_schema(chance, chance.randint(0, 3)), "x-guidance": {"whitespace_flexible": False}})
    texts: dict[str, Any] = {
        "regex": chance.choice(
            (
                *(r"[a-f]{3}-\d\d?", r"(yes|no|\w{1,9})( and \w+)*", r"[\p{L} ]{4,40}\.", r"(a|ab|b)*c"),
                r"(<think>)?[a-z ]{1,20}</think>\n?(yes|no)",
            )
        ),
        "grammar": chance.choice(
            (
                'start: "(" item ("," item)* ")"\nitem: /[0-9]+/ | "x"',
                "start: s\ns: s s | /[a-z]/ | /[a-z]+ /",
                'start: (A | B | C)+ "."\nA: /[ab]{1,3}/\nB: /[bc]+/\nC: "abc"',
                'start: e\ne: e "+" e | e "*" e | "(" e ")" | NUMBER\n%import common.NUMBER',
                f"start: %json {json.dumps(_schema(chance, 1))}",
            )
        ),
        "choices": chance.choice((["yes", "no", "yes, but"], ["é", 'say "a"', "abc", "ab"])),
    }
    return kind, texts[kind]


def _schema(chance: random.Random, depth: int) -> dict[str, Any]:
    flat: tuple[dict[str, Any], ...] = (
        {"type": "integer", "minimum": chance.randint(-300, 0), "maximum": chance.randint(1, 10**6)},
        {"type": "number", "multipleOf": chance.choice((0.5, 3, 0.01))},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": ["red", 7, None, [1]]},
        {"type": "string", "maxLength": 12},
        {"type": "string", "pattern": "^[a-z]+(-[a-z0-9]{1,3})?$"},
        {"type": "string", "format": "date"},
    )
    if not depth:
        return chance.choice(flat)
    inner = [_schema(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    properties = dict(zip(("name", "é", "next value"), inner, strict=False))
    needed = [name for name in properties if chance.random() < 0.7]
    return chance.choice(
        (
            {"type": "object", "properties": properties, "required": needed, "additionalProperties": False},
            {"type": "object", "properties": properties, "required": needed},
            {"type": "array", "items": inner[0], "minItems": chance.randint(0, 2), "maxItems": 4},
            {"anyOf": inner},
        )
    )


def _as_grpc(fields: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": chance.choice(_PROMPTS)}]}
    ids = {"token_ids": [chance.randrange(1, 4000) for _ in range(chance.choice((1, 7, 130)))]}
    prompt: dict[str, Any] = chance.choice(
        ({"text": chance.choice(_PROMPTS)}, {"text": chance.choice(_PROMPTS)}, {"chat": chat})
    )
    if chance.random() < 0.2 and "add_special_tokens" not in fields:
        prompt = {"token_ids": ids}
    method = f"VERIFICATION_METHOD_{fields.pop('verification').upper()}"
    some: dict[str, Any] = {"logprobs": chance.randint(0, 4), "echo": True}
    some |= {"logit_bias": {chance.randrange(4000): chance.uniform(-9, 9) for _ in range(9)}}
    return fields | prompt | {"verification": method} | _some(some, chance)


def _as_completion(fields: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    prompt: Any = chance.choice((chance.choice(_PROMPTS), list(_PROMPTS[:2]), [chance.randrange(1, 4000)] * 5))
    if not isinstance(prompt, str):
        fields.pop("add_special_tokens", None)
    return (
        fields | {"prompt": prompt} | _some({"logprobs": chance.randint(0, 4), "echo": True} | _of_http(chance), chance)
    )


def _as_chat(fields: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    some = {"logprobs": True, **_of_http(chance)}
    if chance.random() < 0.5:
        return fields | {"messages": [{"role": "user", "content": chance.choice(_PROMPTS)}]} | _some(some, chance)
    reasoning = {"reasoning_effort": chance.choice(("low", "none")), "include_reasoning": False}
    return fields | _conversation(chance) | _some(some, chance) | _some(reasoning, chance)


def _conversation(chance: random.Random) -> dict[str, Any]:
    """Of up to four turns, with what clients send back of their answers: reasoning, calls of tools, results."""
    messages: list[dict[str, Any]] = []
    for number in range(chance.randint(1, 4)):
        messages.append({"role": "user", "content": chance.choice(_PROMPTS)})
        call = {"name": chance.choice(("act", "look")), "arguments": chance.choice(('{"a": 1}', "{}", '{"a": "é'))}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        answer: dict[str, Any] = {"role": "assistant", "content": chance.choice(("yes", "", None))}
        answer |= _some({"reasoning_content": "So be it.\n", "tool_calls": calls}, chance)
        messages.append(answer)
        if "tool_calls" in answer:
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": chance.choice(("7", ""))})
    if chance.random() < 0.7:
        messages.append({"role": "user", "content": chance.choice(_PROMPTS)})
    parameters = {"type": "object", "properties": {"a": _schema(chance, 1)}}
    names = chance.choice(((), (), ("act",), ("act", "look")))
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]
    return {"messages": messages} | ({"tools": tools, "tool_choice": "auto"} if tools else {})


def _of_http(chance: random.Random) -> dict[str, Any]:
    bias = {str(chance.randrange(4000)): chance.uniform(-9, 9) for _ in range(9)}
    return {"stream": True, "return_token_ids": True, "return_tokens_as_token_ids": True, "logit_bias": bias}


def _some(options: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    return {name: value for name, value in options.items() if chance.random() < 0.3}


def _with_schema(schema: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    if chance.random() < 0.5:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    tool = {
        "type": "function",
        "function": {"name": "act", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    return {
        "tools": [tool],
        "tool_choice": chance.choice(("required", {"type": "function", "function": {"name": "act"}})),
    }

"""What a client may see of an answer, without what speculation changes: origins, rounds, where a stream is cut.

Knows both APIs; does not know which requests are asked.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx

from specdec.client import Client
from specdec.core.errors import SpecdecError

_JOINED = ("text", "content", "arguments", "reasoning", "reasoning_content")
_NOT_COMPARED = ("id", "created", "prompt_tokens_details", "completion_tokens_details", "metrics")
"""Of an answer over HTTP: drawn anew for each request, or a matter of what is cached or was drafted."""


async def over_grpc(client: Client, timeout_s: float | None = None, **fields: Any) -> dict[str, Any]:
    """Raises SpecdecError."""
    answer: dict[str, Any] = {"prompt": [], "prompt_text": "", "prompt_logprobs": []}
    samples: dict[int, dict[str, Any]] = {}
    async for response in client.stream(timeout_s, **fields):
        if response.HasField("prompt"):
            assert not samples, "the prompt comes first"
            assert response.prompt.first_position == len(answer["prompt"])
            answer["prompt"] += response.prompt.token_ids
            answer["prompt_text"] += response.prompt.text
            answer["prompt_logprobs"] += _flat(response.prompt.logprobs)
        elif response.HasField("chunk"):
            chunk = response.chunk
            sample = samples.setdefault(
                chunk.index, {"ids": [], "text": "", "ends": [], "logprobs": [], "finish": None}
            )
            sample["ids"] += chunk.token_ids
            sample["text"] += chunk.text
            sample["ends"] += chunk.text_ends
            sample["logprobs"] += _flat(chunk.logprobs)
            if chunk.HasField("finish"):
                usage = chunk.finish.usage
                sample["finish"] = (chunk.finish.reason, chunk.finish.stop, chunk.finish.stop_token_id)
                sample["usage"] = (usage.prompt_tokens, usage.completion_tokens)
    return answer | {"samples": dict(sorted(samples.items()))}


def _flat(logprobs: Any) -> list[Any]:
    """Per token: its logprob, and the most likely tokens with theirs."""
    top = len(logprobs.top_ids) // max(1, len(logprobs.logprobs))
    pairs = list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
    return [(logprob, *pairs[i * top : i * top + top]) for i, logprob in enumerate(logprobs.logprobs)]


async def over_http(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A stream as the answer that it makes when it is put together."""
    response = await http.post(path, json=body)
    if "stream" not in body or response.status_code != 200:
        return {"status": response.status_code, **_compared(response.json())}
    whole: dict[str, Any] = {}
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            whole = _joined(whole, _compared(json.loads(line.removeprefix("data: "))))
    return {"status": 200, **whole}


def _compared(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _compared(each) for name, each in value.items() if name not in _NOT_COMPARED}
    return [_compared(each) for each in value] if isinstance(value, list) else value


def _joined(whole: Any, part: Any, name: str = "") -> Any:
    if isinstance(whole, dict) and isinstance(part, dict):
        return whole | {key: _joined(whole.get(key), each, key) for key, each in part.items()}
    if isinstance(whole, list) and isinstance(part, list) and name in ("choices", "tool_calls"):
        by_index = {each["index"]: each for each in whole}
        by_index |= {each["index"]: _joined(by_index.get(each["index"], {}), each) for each in part}
        return [by_index[index] for index in sorted(by_index)]
    if isinstance(whole, list) and isinstance(part, list):
        return whole + part
    return whole if part is None else whole + part if whole and name in _JOINED else part


async def answer_of(client: Client, http: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Over HTTP if there is a ``path``. A refusal is an answer, too."""
    if path:
        return await over_http(http, path, fields)
    try:
        return await over_grpc(client, **fields)
    except SpecdecError as error:
        return {"status": error.code, "message": str(error)}

"""Logprobs of a chunk or a prompt in the shapes of completions and of chat. Knows tokens; does not know answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.v1 import generation_pb2

Told = generation_pb2.Chunk | generation_pb2.Prompt

_LOWEST = -9999.0
"""For minus infinity, which JSON cannot write, as with vLLM."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token and its logprob (None: the first of a prompt). ``top``: the likeliest ones beside it, with theirs."""

    token_id: int
    data: bytes
    logprob: float | None
    top: Sequence[tuple[int, bytes, float]] = ()


def tokens_of(told: Told) -> Iterator[Token]:
    """Those of a chunk or a part of the prompt that has logprobs."""
    logprobs, lacking = told.logprobs, len(told.token_ids) - len(told.logprobs.logprobs)
    data = list(told.tokens) or [b""] * len(told.token_ids)
    top_data = list(told.top_tokens) or [b""] * len(logprobs.top_ids)
    num_top = len(logprobs.top_ids) // max(1, len(logprobs.logprobs))
    bounded = (max(_LOWEST, each) for each in logprobs.top_logprobs)
    top = list(zip(logprobs.top_ids, top_data, bounded, strict=True))
    for place, token_id in enumerate(told.token_ids):
        if (at := place - lacking) < 0:
            yield Token(token_id, data[place], None)
        else:
            likeliest = top[at * num_top : (at + 1) * num_top]
            yield Token(token_id, data[place], max(_LOWEST, logprobs.logprobs[at]), likeliest)


def shown(token_id: int, data: bytes, as_ids: bool) -> str:
    """A token as a string. Bytes that are no whole character become U+FFFD."""
    return f"token_id:{token_id}" if as_ids else data.decode("utf-8", "replace")


def of_completion(told: Told, num_top: int, as_ids: bool, start: int, base: int) -> dict[str, Any]:
    """``start``: where the text of the first token begins, in characters. ``base``: where text_ends count from."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, end in zip(tokens_of(told), told.text_ends or [0] * len(told.token_ids), strict=True):
        found["tokens"].append(shown(token.token_id, token.data, as_ids))
        found["token_logprobs"].append(token.logprob)
        found["top_logprobs"].append(_top(token, num_top, as_ids))
        found["text_offset"].append(start)
        start = max(start, base + end)
    return found


def _top(token: Token, num_top: int, as_ids: bool) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    found = {shown(token_id, data, as_ids): logprob for token_id, data, logprob in token.top[:num_top]}
    found.setdefault(shown(token.token_id, token.data, as_ids), token.logprob)
    return found


def of_chat(told: Told, num_top: int, as_ids: bool) -> dict[str, Any]:
    def entry(token_id: int, data: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": shown(token_id, data, as_ids), "bytes": list(data), "logprob": logprob}

    content = [
        {
            **entry(token.token_id, token.data, token.logprob),
            "top_logprobs": [entry(*each) for each in token.top[:num_top]],
        }
        for token in tokens_of(told)
    ]
    return {"content": content, "refusal": None}


def of_prompt(told: Sequence[generation_pb2.Prompt], num_top: int) -> list[dict[str, Any] | None]:
    """Per token of the prompt, as vLLM tells it: by id, with rank and text. The first token has none."""
    found: list[dict[str, Any] | None] = []
    for token in (token for part in told for token in tokens_of(part)):
        if token.logprob is None:
            found.append(None)
            continue
        ranked = {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": shown(token_id, data, False)}
            for rank, (token_id, data, logprob) in enumerate(token.top[:num_top], 1)
        }
        own = {"logprob": token.logprob, "rank": None, "decoded_token": shown(token.token_id, token.data, False)}
        found.append({str(token.token_id): own, **ranked})
    return found

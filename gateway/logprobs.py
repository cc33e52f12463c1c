"""Logprobs of a chunk or a prompt in the shapes of completions and of chat. Knows tokens; does not know answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.v1 import generation_pb2

Piece = generation_pb2.Chunk | generation_pb2.Prompt
"""Of an answer or of a prompt."""

_LOWEST = -9999.0
"""For minus infinity, which JSON cannot write, as with vLLM."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token and its logprob (None: the first of a prompt). ``top``: the most likely ones, with theirs."""

    token_id: int
    data: bytes
    logprob: float | None
    top: Sequence[tuple[int, bytes, float]] = ()


def tokens_of(piece: Piece) -> Iterator[Token]:
    """Those of a piece that has logprobs."""
    logprobs, num_lacking = piece.logprobs, len(piece.token_ids) - len(piece.logprobs.logprobs)
    data = list(piece.tokens) or [b""] * len(piece.token_ids)
    top_data = list(piece.top_tokens) or [b""] * len(logprobs.top_ids)
    num_top = len(logprobs.top_ids) // max(1, len(logprobs.logprobs))
    bounded = (max(_LOWEST, logprob) for logprob in logprobs.top_logprobs)
    top = list(zip(logprobs.top_ids, top_data, bounded, strict=True))
    for index, token_id in enumerate(piece.token_ids):
        if (row := index - num_lacking) < 0:
            yield Token(token_id, data[index], None)
        else:
            candidates = top[row * num_top : (row + 1) * num_top]
            yield Token(token_id, data[index], max(_LOWEST, logprobs.logprobs[row]), candidates)


def string_of(token_id: int, data: bytes, as_ids: bool = False) -> str:
    """A token as a string. Bytes that are no whole character become U+FFFD."""
    return f"token_id:{token_id}" if as_ids else data.decode("utf-8", "replace")


def of_completion(piece: Piece, num_top: int, *, as_ids: bool, start: int, base: int) -> dict[str, list[Any]]:
    """``start``: where the text of the first token begins, in characters. ``base``: where text_ends count from."""
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, end in zip(tokens_of(piece), piece.text_ends or [0] * len(piece.token_ids), strict=True):
        columns["tokens"].append(string_of(token.token_id, token.data, as_ids))
        columns["token_logprobs"].append(token.logprob)
        columns["top_logprobs"].append(_top(token, num_top, as_ids))
        columns["text_offset"].append(start)
        start = max(start, base + end)
    return columns


def _top(token: Token, num_top: int, as_ids: bool) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top = {string_of(token_id, data, as_ids): logprob for token_id, data, logprob in token.top[:num_top]}
    top.setdefault(string_of(token.token_id, token.data, as_ids), token.logprob)
    return top


def of_chat(piece: Piece, num_top: int, *, as_ids: bool) -> dict[str, Any]:
    def entry(token_id: int, data: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": string_of(token_id, data, as_ids), "bytes": list(data), "logprob": logprob}

    content = [
        {
            **entry(token.token_id, token.data, token.logprob),
            "top_logprobs": [entry(*candidate) for candidate in token.top[:num_top]],
        }
        for token in tokens_of(piece)
    ]
    return {"content": content, "refusal": None}


def merged(parts: Sequence[dict[str, Any]], is_chat: bool) -> dict[str, Any]:
    """The logprobs of several pieces as those of one."""
    names = ("content",) if is_chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    lists = {name: [value for part in parts for value in part[name]] for name in names}
    return lists | ({"refusal": None} if is_chat else {})


def of_prompt(pieces: Sequence[generation_pb2.Prompt], num_top: int) -> list[dict[str, Any] | None]:
    """Per token of the prompt, as vLLM has it: by id, with rank and text. The first token has none."""
    entries: list[dict[str, Any] | None] = []
    for token in (token for piece in pieces for token in tokens_of(piece)):
        if token.logprob is None:
            entries.append(None)
            continue
        ranked = [(token.token_id, token.data, token.logprob), *token.top[:num_top]]
        entry: dict[str, Any] = {}
        for rank, (token_id, data, logprob) in enumerate(ranked):
            entry[str(token_id)] = {
                "logprob": logprob,
                "rank": rank or None,
                "decoded_token": string_of(token_id, data),
            }
        entries.append(entry)
    return entries

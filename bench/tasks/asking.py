"""Asks every question with every method, and compares the texts. Does not know how methods are served."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.tasks.methods import ALONE
from bench.tasks.questions import Question
from specdec.client import Client


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn of a question by one method."""

    task: str
    method: str
    seconds: float
    num_tokens: int
    num_rounds: int


async def ask(
    clients: Mapping[str, Client],
    questions: Sequence[Question],
    max_tokens: int,
    temperature: float,
    done: Callable[[], None],
) -> list[Answered]:
    """All answers of each method's client. Raises ValueError if a text differs."""
    found: list[Answered] = []
    methods = list(clients)
    for number, (task, turns) in enumerate([Question("", ("Say hello.",)), *questions]):
        messages: list[dict[str, str]] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            texts = set()
            for method in methods[number % 2 :] + methods[: number % 2]:
                started = time.perf_counter()
                [sample] = await clients[method].generate(
                    chat={"messages": messages},
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=1,
                    cache_salt=method,  # each reads the prompt itself, and learns from its own answers alone
                    **({"num_draft_tokens": 0} if method == ALONE else {}),
                )
                seconds = time.perf_counter() - started
                texts.add(sample.text)
                if number:  # the first question warms up
                    num_rounds = sample.finish.speculation.num_rounds
                    found.append(Answered(task, method, seconds, len(sample.token_ids), num_rounds))
            if len(texts) > 1:
                raise ValueError(f"the texts of a question differ: {turn[:60]}")
            messages.append({"role": "assistant", "content": texts.pop()})
        done()
    return found

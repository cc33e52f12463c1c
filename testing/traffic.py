"""Requests with an answer known in advance: sends them, times them, compares the answers. Knows no faults.

The expected answer is computed by the models' reference, so "same" needs no fault-free run.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.chaos.models import Reference
from bench.chaos.outcome import Outcome, percentile
from specdec.client import Client, Sample
from specdec.core.errors import SpecdecError
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. ``temperature`` 0 is greedy; otherwise sampling is coupled. ``num_draft_tokens`` None: adaptive."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float
    timeout_s: float | None = None
    num_draft_tokens: int | None = None

    def expected(self, reference: Reference) -> list[int]:
        """The only right output ids."""
        spec = SequenceSpec(self.prompt, len(self.prompt), SamplingParams(self.temperature), self.seed)
        return reference.text(spec, self.max_tokens)


@dataclass(slots=True)
class Answer:
    """The response to a request so far. Times are those of time.monotonic."""

    asked: Asked
    sample: Sample = field(default_factory=Sample)
    started: float = 0.0
    admitted: float = 0.0
    ended: float = 0.0
    error: Exception | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, number of ids) per chunk

    @property
    def done(self) -> bool:
        return self.ended > 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        times = [when for when, _ in self.arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def num_replays(self) -> int:
        return self.sample.finish.speculation.num_replays

    def tokens_between(self, start: float, end: float) -> int:
        return sum(count for when, count in self.arrivals if start <= when < end)

    def same(self, reference: Reference) -> bool:
        """Whether the ids are the expected ones: all of them if the request finished, else a prefix."""
        ids = self.sample.token_ids
        whole = len(ids) == self.asked.max_tokens or not self.sample.finished
        return whole and ids == self.asked.expected(reference)[: len(ids)]


async def ask(client: Client, asked: Asked, answer: Answer | None = None) -> Answer:
    """Send a request and read it to its end. Errors (also lost or repeated ids) go into the answer; none is raised."""
    answer = answer or Answer(asked)
    answer.started = time.monotonic()
    fields: dict[str, Any] = {"max_tokens": asked.max_tokens, "seed": asked.seed, "temperature": asked.temperature}
    if asked.num_draft_tokens is not None:
        fields["num_draft_tokens"] = asked.num_draft_tokens
    prompt = generation_pb2.TokenIds(token_ids=asked.prompt)
    try:
        async for response in client.stream(asked.timeout_s, token_ids=prompt, **fields):
            now = time.monotonic()
            if response.HasField("chunk"):
                answer.sample.add(response.chunk)
                answer.arrivals.append((now, len(response.chunk.token_ids)))
            else:
                answer.admitted = now
    except (SpecdecError, ValueError) as error:
        answer.error = error
    finally:
        answer.ended = time.monotonic()
    return answer


def several(count: int, max_tokens: int, chance: random.Random, prompt_tokens: int = 8) -> list[Asked]:
    """Requests with different prompts and seeds, alternately greedy and at T = 0.8."""
    return [
        Asked(
            tuple(chance.randrange(1024) for _ in range(prompt_tokens)),
            max_tokens,
            chance.getrandbits(63),
            0.8 if number % 2 else 0.0,
        )
        for number in range(count)
    ]


class Traffic:
    """Concurrent requests. ``async with`` cancels those that are left at the end."""

    def __init__(self, client: Client, asked: Sequence[Asked]) -> None:
        self.answers = [Answer(each) for each in asked]
        self._client = client
        self._tasks: list[asyncio.Task[Answer]] = []

    async def __aenter__(self) -> Traffic:
        self._tasks = [asyncio.create_task(ask(self._client, each.asked, each)) for each in self.answers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.sample.token_ids) for answer in self.answers)

    async def cancel(self, chance: random.Random) -> int:
        """Cancel all requests in random order, about 100 per second. The number of requests that were still running."""
        tasks, num_cancelled = list(self._tasks), 0
        chance.shuffle(tasks)
        for task in tasks:
            await asyncio.sleep(chance.expovariate(100.0))
            num_cancelled += task.cancel()
        return num_cancelled

    async def reached(self, share: float, timeout_s: float = 60.0) -> None:
        """Wait until this share of all tokens has arrived, or all requests have ended. Raises TimeoutError."""
        wanted = share * sum(answer.asked.max_tokens for answer in self.answers)
        async with asyncio.timeout(timeout_s):
            while self.num_tokens < wanted and not all(answer.done for answer in self.answers):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def finished(self, timeout_s: float = 120.0) -> list[Answer]:
        """All answers. A request that has not ended after ``timeout_s`` has a TimeoutError as its error."""
        _, hanging = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task, answer in zip(self._tasks, self.answers, strict=True):
            if task in hanging:
                answer.error = TimeoutError(f"hangs for {timeout_s:g} s")
        return self.answers


class Steady:
    """``count`` clients that send one request after another. ``async with`` lets the last requests finish."""

    def __init__(self, client: Client, count: int, max_tokens: int, chance: random.Random) -> None:
        self.answers: list[Answer] = []
        self._client = client
        self._count = count
        self._max_tokens = max_tokens
        self._chance = chance
        self._stopping = False

    async def __aenter__(self) -> Steady:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(self._count)]
        return self

    async def __aexit__(self, kind: type | None, *_: object) -> None:
        self._stopping = True
        for task in self._tasks if kind else ():
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    async def _ask(self) -> None:
        while not self._stopping:
            for asked in several(2, self._max_tokens, self._chance):
                self.answers.append(Answer(asked))
                await ask(self._client, asked, self.answers[-1])


def check_same(outcome: Outcome, answers: Sequence[Answer], reference: Reference, what: str = "requests") -> None:
    """Check that all requests finished with the expected ids."""
    finished = sum(answer.sample.finished for answer in answers)
    same = sum(answer.same(reference) for answer in answers)
    errors = sorted({f"{type(a.error).__name__}: {a.error}"[:160] for a in answers if a.error is not None})
    text = f"{finished} of {len(answers)} {what} finished, {same} same"
    good = finished == same == len(answers)
    outcome.check(good, text if good else f"{text}; {'; '.join(errors[:3])}")


def added_gaps(answers: Sequence[Answer], since: float, until: float = float("inf")) -> list[float]:
    """The longest gap of each request within the time span, minus the median gap of all requests, in seconds."""
    usual = percentile((gap for answer in answers for gap in answer.gaps), 0.5)
    worst = []
    for answer in answers:
        times = [when for when, _ in answer.arrivals]
        touching = [b - a for a, b in itertools.pairwise(times) if b > since and a < until]
        if touching:
            worst.append(max(0.0, max(touching) - usual))
    return worst


def note_gaps(outcome: Outcome, gaps: Sequence[float], limit_p99: float, name: str = "added gap") -> None:
    outcome.figures[f"{name} p50"] = round(percentile(gaps, 0.5), 4)
    outcome.note(f"{name} p50 {percentile(gaps, 0.5):.3g} s")
    outcome.at_most(f"{name} p99", percentile(gaps, 0.99), limit_p99)


def with_timeout(asked: Asked, timeout_s: float) -> Asked:
    return replace(asked, timeout_s=timeout_s)

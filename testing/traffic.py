"""Requests with an answer known in advance: sends them, times them, compares the answers. Knows no faults.

The expected answer is computed by the models' reference, so "same" needs no fault-free run.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.client import Client, Sample
from specdec.core.errors import SpecdecError
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.v1 import generation_pb2


class Reference(Protocol):
    """What the target writes when nothing fails."""

    def text(self, spec: SequenceSpec, max_tokens: int) -> list[int]:
        """The only right output ids."""
        ...


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

    @property
    def fields(self) -> dict[str, Any]:
        """Of a GenerateRequest."""
        prompt = generation_pb2.TokenIds(token_ids=self.prompt)
        fields = {"token_ids": prompt, "temperature": self.temperature}
        fields |= {"max_tokens": self.max_tokens, "seed": self.seed}
        return fields | ({} if self.num_draft_tokens is None else {"num_draft_tokens": self.num_draft_tokens})


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

    def longest_gap(self, since: float, until: float = float("inf")) -> float | None:
        """Of the gaps that touch the time span; None if there is none."""
        times = [when for when, _ in self.arrivals]
        return max((b - a for a, b in itertools.pairwise(times) if b > since and a < until), default=None)

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
    try:
        async for response in client.stream(asked.timeout_s, **asked.fields):
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


async def interrupted(
    client: Client, asked: Sequence[Asked], share: float, fault: Callable[[], Awaitable[object]]
) -> tuple[float, list[Answer]]:
    """Requests with a ``fault`` once this share of their tokens has arrived; the time of the fault, and all answers."""
    async with Traffic(client, asked) as traffic:
        await traffic.reached(share)
        began = time.monotonic()
        await fault()
        return began, await traffic.finished()


class Steady:
    """Each of ``clients`` sends one request after another, as ``draw`` makes them. ``async with`` lets the last ones
    finish."""

    def __init__(self, clients: Sequence[Client], draw: Callable[[], Sequence[Asked]]) -> None:
        self.answers: list[Answer] = []
        self._clients = clients
        self._draw = draw
        self._stopping = False

    async def __aenter__(self) -> Steady:
        self._tasks = [asyncio.create_task(self._ask(client)) for client in self._clients]
        return self

    async def __aexit__(self, kind: type | None, *_: object) -> None:
        self._stopping = True
        for task in self._tasks if kind else ():
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    async def _ask(self, client: Client) -> None:
        while not self._stopping:
            for asked in self._draw():
                self.answers.append(Answer(asked))
                await ask(client, asked, self.answers[-1])


def added_gaps(answers: Sequence[Answer], since: float, until: float = float("inf")) -> list[float]:
    """The longest gap of each request within the time span, minus the median gap of all requests, in seconds."""
    usual = percentile((gap for answer in answers for gap in answer.gaps), 0.5)
    longest = [answer.longest_gap(since, until) for answer in answers]
    return [max(0.0, gap - usual) for gap in longest if gap is not None]


def percentile(values: Iterable[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0

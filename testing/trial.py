"""A lab where something is broken on purpose: what was observed, and the criteria that were missed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from specdec.client import Client
from testing.lab import Lab, Models, Process
from testing.traffic import Answer, Asked, Steady, Traffic, percentile, several


class Trial(Lab):
    """One run of a row of the fault table. ``seen`` are observations, ``failures`` and ``slow`` fail the row,
    ``figures`` go to the JSON file. ``short``: with fewer requests and times, for tests."""

    def __init__(self, seed: int, short: bool = False, models: Models | None = None) -> None:
        super().__init__(seed, models)
        self.seed = seed
        self.short = short
        self.seen: list[str] = []
        self.failures: list[str] = []
        self.slow: list[str] = []  # missed time limits, perhaps only because the machine is busy
        self.figures: dict[str, float] = {}

    @property
    def passed(self) -> bool:
        return not (self.failures or self.slow)

    def requests(self, count: int, max_tokens: int, prompt_tokens: int = 8) -> list[Asked]:
        """See testing.traffic.several."""
        return several(count, max_tokens, self.chance, prompt_tokens)

    def steady(self, client: Client, count: int, max_tokens: int) -> Steady:
        """``count`` streams of requests through one client."""
        return Steady([client] * count, lambda: self.requests(2, max_tokens))

    def note(self, text: str) -> None:
        self.seen.append(text)

    def check(self, good: bool, text: str) -> None:
        """Record the observation ``text``; it is a failure unless ``good``."""
        (self.seen if good else self.failures).append(text)

    def at_most(self, name: str, value: float, limit: float, unit: str = "s") -> None:
        """Record a figure that must not exceed ``limit``. A missed finite time counts as slow, not as a failure."""
        self.figures[name] = round(value, 4)
        shown = f"{name} {value:.3g} {unit}".rstrip()
        if value <= limit:
            self.note(shown)
        else:
            late = unit in ("s", "ms") and math.isfinite(value)
            (self.slow if late else self.failures).append(f"{shown}, over {limit:.3g}")

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self.figures[name] = round(value, 4)
        shown = f"{name} {value:.3g} {unit}".rstrip()
        self.check(value >= limit, shown if value >= limit else f"{shown}, under {limit:.3g}")

    def note_gaps(self, gaps: Sequence[float], limit_p99: float, name: str = "added gap") -> None:
        self.figures[f"{name} p50"] = round(percentile(gaps, 0.5), 4)
        self.note(f"{name} p50 {percentile(gaps, 0.5):.3g} s")
        self.at_most(f"{name} p99", percentile(gaps, 0.99), limit_p99)

    def check_same(self, answers: Sequence[Answer], what: str = "requests") -> None:
        """Check that all requests finished with the expected ids."""
        finished = sum(answer.sample.finished for answer in answers)
        same = sum(answer.same(self.reference) for answer in answers)
        errors = sorted({f"{type(a.error).__name__}: {a.error}"[:160] for a in answers if a.error is not None})
        text = f"{finished} of {len(answers)} {what} finished, {same} same"
        good = finished == same == len(answers)
        self.check(good, text if good else f"{text}; {'; '.join(errors[:3])}")

    async def check_serves(self, client: Client, count: int, max_tokens: int, what: str = "requests") -> list[Answer]:
        """Send requests and check that they finish with the expected ids."""
        async with Traffic(client, self.requests(count, max_tokens)) as traffic:
            answers = await traffic.finished(30.0)
        self.check_same(answers, what)
        return answers

    def check_no_tracebacks(self, processes: Iterable[Process], what: str = "the logs") -> None:
        count = sum(process.num_logged("Traceback") for process in processes)
        self.check(not count, f"{count} tracebacks in {what}")


def num_replays(answers: Iterable[Answer]) -> int:
    """Of the requests that finished."""
    return sum(answer.num_replays for answer in answers if answer.sample.finished)

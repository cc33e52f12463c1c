"""Lets contenders take turns on the same prompts, and records their runs. Does not know what a contender does."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.peers.contender import Prompts, Run
from bench.peers.prompts import PromptSource

Contender = Callable[[Prompts, int], Awaitable[Run]]
"""Continues all prompts at once, by at most so many tokens each."""


@dataclass(slots=True)
class Row:
    """One contender's runs with ``streams`` requests at a time. ``same``: outputs equal to the first contender's."""

    name: str
    streams: int
    runs: list[Run] = field(default_factory=list)
    same: int = 0

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def compared(self) -> int:
        return self.streams * len(self.runs)

    def over(self, other: Row) -> float:
        """The median over the turns of the ratio of speeds. The load of the machine varies less within a turn."""
        turns = zip(self.runs, other.runs, strict=True)
        return statistics.median(own.tokens_per_s / its.tokens_per_s for own, its in turns)

    def figure(self, name: str) -> float | None:
        """The median of the figure ``name``; None if no run has it."""
        values = [run.figures[name] for run in self.runs if name in run.figures]
        return statistics.median(values) if values else None


async def take_turns(
    contenders: Mapping[str, Contender],
    prompts: PromptSource,
    *,
    streams: int,
    prompt_tokens: int,
    max_tokens: int,
    repeats: int,
    report: Callable[[str], None],
) -> list[Row]:
    """``repeats`` runs of each contender after one that warms up. The order rotates by one each time."""
    rows = {name: Row(name, streams) for name in contenders}
    order = list(contenders)
    for repeat in range(repeats + 1):
        taken = prompts.take(streams, prompt_tokens)
        outputs: dict[str, Sequence[list[int]]] = {}
        for name in order:
            report(f"{streams} at a time, {f'turn {repeat} of {repeats}' if repeat else 'warming up'}: {name}")
            run = await contenders[name](taken, max_tokens)
            outputs[name] = run.outputs
            if repeat:
                rows[name].runs.append(run)
        if repeat:
            expected = next(outputs[name] for name in contenders)
            for name, row in rows.items():
                row.same += sum(got == want for got, want in zip(outputs[name], expected, strict=True))
        order = [*order[1:], order[0]]
    return list(rows.values())

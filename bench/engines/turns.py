"""Lets contenders take turns on the same prompts, and records their runs. Does not know what a contender does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.peers.contender import Prompts, Run
from bench.peers.measuring import Runs
from bench.peers.prompts import PromptSource

Contender = Callable[[Prompts, int], Awaitable[Run]]
"""Continues all prompts at once, by at most so many tokens each."""


@dataclass(slots=True)
class Row(Runs):
    """With ``streams`` requests at a time. ``same``: outputs equal to the first contender's."""

    name: str
    streams: int
    same: int = 0

    @property
    def compared(self) -> int:
        return self.streams * len(self.runs)


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

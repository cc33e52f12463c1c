"""Lets the contenders of one number of streams take turns, and records their runs.

Knows turns, medians and the comparison of outputs; does not know what a contender does.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.peers.contender import Contender, Kind, Run, Settings
from bench.peers.prompts import PromptSource

Reference = Callable[[list[int], int], Awaitable[list[int]]]
"""Maps a prompt and max_tokens to the output of transformers' generate for this prompt alone."""


@dataclass(slots=True)
class Runs:
    """One contender's runs."""

    runs: list[Run] = field(default_factory=list, kw_only=True)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.runs)

    def over(self, other: Runs) -> float:
        """The median over the turns of the speed ratio. A turn has the same prompts and takes a minute or two; the
        prompts and the load of the machine vary more between turns than within one."""
        turns = zip(self.runs, other.runs, strict=True)
        return statistics.median(own.tokens_per_s / its.tokens_per_s for own, its in turns)

    def figure(self, name: str) -> float | None:
        """The median of the figure ``name`` over the runs; None if no run has it."""
        values = [run.figures[name] for run in self.runs if name in run.figures]
        return statistics.median(values) if values else None


@dataclass(slots=True)
class Row(Runs):
    """``identical`` of the ``compared`` outputs equal generate's, token by token."""

    kind: Kind
    streams: int
    settings: Settings
    identical: int = 0
    compared: int = 0


async def take_turns(
    contenders: Sequence[tuple[Contender, Settings]],
    prompts: PromptSource,
    reference: Reference,
    *,
    prompt_length: int,
    max_tokens: int,
    repeats: int,
    num_compared: int,
    report: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Run all contenders in turn on the same prompts, ``repeats`` times. The order rotates by one each time.

    The outputs of the first ``num_compared`` prompts of every repetition are compared with ``reference``.
    """
    rows = [Row(contender.kind, contender.streams, settings) for contender, settings in contenders]
    order = list(range(len(rows)))
    for repeat in range(repeats):
        taken = prompts.take(contenders[0][0].streams, prompt_length)
        report(f"{rows[0].streams} at a time: reference outputs of generate")
        expected = [await reference(prompt, max_tokens) for prompt in taken[:num_compared]]
        for index in order:
            contender, settings = contenders[index]
            report(f"{contender.name}: repetition {repeat + 1} of {repeats}")
            run = await contender.run(settings, taken, max_tokens)
            row = rows[index]
            row.runs.append(run)
            row.identical += sum(got == want for got, want in zip(run.outputs, expected, strict=False))
            row.compared += len(expected)
        order = [*order[1:], order[0]]
    return rows


def by_kind(rows: Sequence[Row]) -> Mapping[tuple[Kind, int], Row]:
    return {(row.kind, row.streams): row for row in rows}

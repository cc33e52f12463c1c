"""``specdec bench plan``: predictions of ``specdec plan`` next to deployments of ``bench load`` and ``bench distance``.

The table models of both benchmarks run behind the real services, with a fault proxy in front of the draft: several
requests with a draft nearby, and one with a draft far away. Pass times are those that the models sleep. What messages
cost on this machine is measured first, with models that take no time.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.distance.lab import Lab, TableCosts, lab, served_tables
from bench.harness.command import run_benchmark
from bench.harness.runner import Request
from bench.load import ACCEPTANCE, PASS_MS, ROW_US, STEP_MS
from specdec.cli.processes import StartError
from specdec.planner.deployment import Deployment, Drafting, Pair, Paths, Workload
from specdec.planner.pass_time import PassTime
from specdec.speculation.cost import chain_chances, expected_tokens

LOAD = TableCosts(PASS_MS, STEP_MS, ACCEPTANCE, row_us=ROW_US)
DISTANCE = TableCosts()
"""The pairs of both benchmarks."""

FREE = TableCosts(pass_ms=0.0, step_ms=0.0, row_us=0.0)
_SETTINGS = {
    "alone": Drafting(0),
    "K = 4": Drafting(4),
    "K = 4 ahead": Drafting(4, ahead=True),
    "chosen": None,  # by the policy; the prediction is that of the best setting
}
_PROMPT, _NUM_AHEAD = 3, 60
_LONGER = 4
"""So many times as many tokens if only one request drafts: the acceptance of a short text varies."""


@dataclass(frozen=True, slots=True)
class Cell:
    """``requests`` start together; ``drafting`` is a key of _SETTINGS."""

    costs: TableCosts
    requests: int
    round_trip_ms: float
    drafting: str

    def predicted(self, paths: Paths, tokens: int) -> float:
        """Tokens per second."""
        costs = self.costs
        target = PassTime.line(costs.pass_ms / 1e3, costs.row_us / 1e6)
        deployment = Deployment(
            Pair(target, PassTime.line(costs.step_ms / 1e3), costs.acceptance, costs.runner_up),
            Paths(self.round_trip_ms / 1e3, paths.overhead_s, paths.work_s),
            Workload(self.requests, _PROMPT, tokens),
        )
        return deployment.speed(_SETTINGS[self.drafting] or deployment.best()).tokens_per_s


@dataclass(frozen=True, slots=True)
class Row:
    cell: Cell
    measured: float  # tokens per second
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def cells() -> Iterator[Cell]:
    for costs, requests, round_trip_ms in (
        *((LOAD, requests, 0.0) for requests in (1, 8, 32)),
        *((DISTANCE, 1, round_trip_ms) for round_trip_ms in (1.0, 20.0, 50.0)),
    ):
        yield from (Cell(costs, requests, round_trip_ms, drafting) for drafting in _SETTINGS)


def main(
    tokens: Annotated[int, typer.Option(min=16, help="tokens of an answer")] = 160,
    repeats: Annotated[int, typer.Option(min=1, help="runs of each row; medians are compared")] = 3,
    json_file: Annotated[str | None, typer.Option("--json", help="file to write the figures to")] = None,
) -> None:
    """Measure small deployments and compare them with predictions."""
    console = Console(highlight=False)
    try:
        with console.status("Measuring ..."):
            paths, rows = asyncio.run(_measure(tokens, repeats))
    except StartError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    console.print(table(rows))
    errors = [abs(row.error) for row in rows]
    console.print(f"Messages: {paths.overhead_s * 1e3:.2f} ms an exchange, {paths.work_s * 1e3:.2f} ms an answer.")
    console.print(f"Off by {statistics.median(errors):.1%} in the median and by {max(errors):.1%} at most.")
    if json_file:
        Path(json_file).write_text(json.dumps([asdict(row) | {"error": row.error} for row in rows], indent=1) + "\n")


def table(rows: Sequence[Row]) -> Table:
    shown = Table("requests", "draft away by", "drafting", "tokens/s", "plan", "off by", box=None, header_style="bold")
    for row in rows:
        cell = row.cell
        figures = (f"{row.measured:.1f}", f"{row.predicted:.1f}", f"{row.error:+.1%}")
        shown.add_row(str(cell.requests), f"{cell.round_trip_ms:g} ms", cell.drafting, *figures)
    return shown


async def _measure(tokens: int, repeats: int) -> tuple[Paths, list[Row]]:
    paths, rows = await _message_path(tokens, repeats), []
    for costs in (LOAD, DISTANCE):
        async with deployed(costs) as running:
            for cell in (cell for cell in cells() if cell.costs == costs):
                longer = _LONGER if cell.requests == 1 and cell.drafting != "alone" else 1
                measured = await tokens_per_s(running, cell, longer * tokens, repeats)
                rows.append(Row(cell, measured, cell.predicted(paths, longer * tokens)))
    return paths, rows


async def _message_path(tokens: int, repeats: int) -> Paths:
    """Costs of an exchange and of an answer; a round has two of each."""
    async with deployed(FREE) as running:
        one, many = [Cell(FREE, requests, 0.0, "K = 4") for requests in (1, 32)]
        expected = expected_tokens(chain_chances([FREE.acceptance]), 4)[4]
        round_s, many_s = [
            expected * cell.requests / await tokens_per_s(running, cell, _LONGER * tokens, repeats)
            for cell in (one, many)
        ]
    work_s = many_s / many.requests / 2
    return Paths(0.0, max(0.0, round_s / 2 - work_s), work_s)


async def tokens_per_s(running: Lab, cell: Cell, tokens: int, repeats: int) -> float:
    """The median of the runs after the first one, in which the policy learns."""
    running.move_draft(cell.round_trip_ms)
    drafting = _SETTINGS[cell.drafting]
    number = {} if drafting is None else {"num_draft_tokens": drafting.num_draft_tokens}
    ask = running.endpoints["ahead" if drafting is None or drafting.ahead else "near"].asks(**number)
    chance, rates = random.Random(repr(cell)), []  # each cell has texts of its own
    for _ in range(1 + repeats):
        turn = chance.randrange(1024)
        prompts = [{"token_ids": {"token_ids": [1 + index, turn, 3]}} for index in range(cell.requests)]
        rates.append((await ask(Request(prompts, tokens, temperature=0.0, seed=1, salt=""))).tokens_per_s)
    return statistics.median(rates[1:])


def deployed(costs: TableCosts) -> AbstractAsyncContextManager[Lab]:
    """The services. Raises StartError."""
    return lab(replace(served_tables(costs), unrelated=()), _NUM_AHEAD)


if __name__ == "__main__":
    run_benchmark(main)

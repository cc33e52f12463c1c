"""``specdec bench never-slower``: whether drafting is anywhere slower than the target alone.

Each method with the adaptive policy takes turns with the target alone, at several loads, lengths of answers and
temperatures. A finished request is replaced by the next one. The lowest ratio of speeds is held against a floor.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.engines.comparisons import flags_of
from bench.harness.command import Common, run_comparison
from bench.harness.deployment import Processes
from bench.harness.methods import ALONE, KV_SLOTS, as_deployed, chosen, served, with_models
from bench.harness.models import PairName, label_of
from bench.harness.questions import Question
from bench.harness.report import Heat, Say, Values, compare, conditions, finish, matrix
from bench.harness.runner import Case, Contender, Results, Window, at_temperatures
from bench.harness.windows import case_in_window
from bench.load import table_contenders, table_questions
from specdec.cli.main import Engine

_TEMPERATURES = (0.0, 0.7)
_MIN_WINDOW_TOKENS = 64
"""For each live request: several short answers, or one long one."""
_KV_SLOTS_OF_A_REQUEST = 1024


@dataclass(frozen=True, slots=True)
class Cell:
    """The speed of a method over the target alone, by the time of all answers."""

    ratio: float
    method: str
    case: str

    def __str__(self) -> str:
        return f"{self.method}, {self.case}: {self.ratio:.3f} x the target alone"


def case_of(
    contenders: Sequence[Contender], questions: Iterator[Question], load: int, tokens: int, repeats: int
) -> Case:
    """``load`` requests at any time, with answers of ``tokens`` tokens at most."""

    def take(count: int) -> list[Question]:
        return list(itertools.islice(questions, count))

    name = f"{load} request{'s' * (load > 1)} of {tokens} tokens"
    window = Window(load, load * max(tokens, _MIN_WINDOW_TOKENS))
    return case_in_window(name, contenders, take, window=window, max_tokens=tokens, repeats=repeats)


def cells_of(results: Results) -> list[Cell]:
    return [Cell(row.over_first_in_all, row.contender, row.case) for row in results.rows if row.contender != ALONE]


def by_case(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """The ratios by case and method."""
    ratios: dict[str, dict[str, float]] = {}
    for cell in cells:
        ratios.setdefault(cell.case, {})[cell.method] = cell.ratio
    return ratios


def _chart(results: Results, ratios: Values) -> Heat:
    notes = {
        case: {method: f"{results.row(case, method).tokens_per_s:.1f} tokens/s" for method in of_case}
        for case, of_case in ratios.items()
    }
    return Heat("Speed over the target alone", ratios, notes)


def judge(cells: Sequence[Cell], floor: float, console: Console) -> None:
    """Name the lowest cell. Raises typer.Exit with status 1 if it is below the floor."""
    lowest = min(cells, key=lambda cell: cell.ratio)
    num_below = sum(cell.ratio < floor for cell in cells)
    console.print(f"{num_below} of {len(cells)} cells are below {floor:g}. The lowest:")
    console.print(f"  {lowest}", style="bold red" if num_below else "bold", markup=False)
    if num_below:
        raise typer.Exit(1)


def main(
    common: Common,
    floor: Annotated[float, typer.Option(min=0, help="status 1 if a ratio is lower")] = 0.95,
    only: Annotated[list[str] | None, typer.Option(help="one of the methods; may be repeated; default: all")] = None,
    engine: Annotated[Engine, typer.Option(help="of the target and the draft")] = Engine.torch,
    requests: Annotated[str, typer.Option(help="numbers of concurrent requests, separated by commas")] = "1,4,16",
    tokens: Annotated[str, typer.Option(help="of an answer at most, separated by commas")] = "16,64,256",
    repeats: Annotated[int, typer.Option(min=1, help="turns; a ratio is by the time of all of them")] = 3,
) -> None:
    """Whether a method is anywhere slower than the target alone: by load, length of answers, and temperature.

    Methods: lookup, each draft, each head. Default models: smollm2; temperatures 0 and 0.7. A running deployment is
    measured as it is, and without drafting.
    """
    loads, lengths = ([int(number) for number in numbers.split(",")] for numbers in (requests, tokens))
    of_tables = not common.is_running and common.pair is PairName.table

    @asynccontextmanager
    async def prepare(directory: Path, say: Say) -> AsyncIterator[list[Case]]:
        async with AsyncExitStack() as stack:
            asked = table_questions() if of_tables else replace(common, turns=1).asked()
            if of_tables:
                say(conditions(label_of(PairName.table), max(lengths)))
                groups = await table_contenders(await stack.enter_async_context(Processes()), only or ())
            elif common.is_running:
                say(conditions("a running deployment", max(lengths)))
                groups = [await stack.enter_async_context(as_deployed(common))]
            else:
                models = common.models(PairName.smollm2, directory)
                say(conditions(f"{models.label}; engine {engine}", max(lengths)))
                methods, kv_slots = chosen(with_models(models), only or []), _KV_SLOTS_OF_A_REQUEST * max(loads)
                services = served(common, models.target, methods, max(KV_SLOTS, kv_slots), flags=flags_of(engine))
                groups = [await stack.enter_async_context(services)]
            if engine is Engine.vllm:  # near ties may differ
                groups = [[replace(contender, same_as="") for contender in contenders] for contenders in groups]
            random.Random(1).shuffle(asked)
            questions = itertools.cycle(asked)
            cases = [
                case_of(contenders, questions, load, length, repeats)
                for load, length in itertools.product(loads, lengths)
                for contenders in groups
            ]
            yield at_temperatures(cases, common.temperature or _TEMPERATURES)

    results = compare(prepare, max(lengths))
    cells = cells_of(results)
    ratios = by_case(cells)
    tables = {"Speed over the target alone, by the time of all answers": matrix(ratios, floor)}
    finish(common, results, tables, _chart(results, ratios), _legend(results, engine), ratios=ratios, floor=floor)
    judge(cells, floor, Console(highlight=False))


def _legend(results: Results, engine: Engine) -> str:
    if engine is Engine.torch:
        return ""
    rows = [row for row in results.rows if row.contender != ALONE]
    num_same, num_texts = (sum(getattr(row, name) for row in rows) for name in ("num_same", "num_texts"))
    return f"{num_same} of {num_texts} texts are the target alone's; on engine vllm near ties may differ"


if __name__ == "__main__":
    run_comparison(main, "turns", "tokens")

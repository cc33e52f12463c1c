"""``specdec bench never-slower``: whether drafting is anywhere slower than the target alone.

Each method with the adaptive policy takes turns with the target alone, at several loads, lengths of answers and
temperatures. A finished request is replaced by the next one. The lowest ratio of speeds is held against a floor.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.engines.comparisons import flags_of
from bench.harness.command import Common, run_comparison
from bench.harness.methods import ALONE
from bench.harness.models import PairName
from bench.harness.questions import Question
from bench.harness.report import Heat, Say, Values, compare, finish, matrix
from bench.harness.runner import Case, Contender, Window, at_temperatures
from bench.harness.windows import case_in_window
from bench.load import Load
from specdec.cli.main import Engine

_TEMPERATURES = (0.0, 0.7)
_MIN_WINDOW_TOKENS = 64
"""For each live request: several short answers, or one long one."""
_KV_SLOTS_OF_A_REQUEST = 1024


def case_of(
    contenders: Sequence[Contender], questions: Iterator[Question], load: int, tokens: int, repeats: int
) -> Case:
    """``load`` requests at any time, with answers of ``tokens`` tokens at most."""

    def take(count: int) -> list[Question]:
        return list(itertools.islice(questions, count))

    name = f"{load} request{'s' * (load > 1)} of {tokens} tokens"
    window = Window(load, load * max(tokens, _MIN_WINDOW_TOKENS))
    return case_in_window(name, contenders, take, window=window, max_tokens=tokens, repeats=repeats)


def judge(ratios: Values, floor: float) -> None:
    """Name the lowest ratio, of cases and methods. Raises typer.Exit with status 1 if it is below the floor."""
    cells = [(ratio, method, case) for case, of_case in ratios.items() for method, ratio in of_case.items()]
    num_below = sum(ratio < floor for ratio, *_ in cells)
    ratio, method, case = min(cells)
    console = Console(highlight=False)
    console.print(f"{num_below} of {len(cells)} cells are below {floor:g}. The lowest:")
    console.print(f"  {method}, {case}: {ratio:.3f} x the target alone", style="bold red" if num_below else "bold")
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

    Methods: lookup, each draft, each head. Temperatures by default: 0 and 0.7.
    Default models: smollm2. A running deployment is measured as it is, and without drafting.
    """
    loads, lengths = ([int(number) for number in numbers.split(",")] for numbers in (requests, tokens))
    load = Load(
        replace(common, turns=1),
        of_tables=common.pair is PairName.table,
        max_tokens=max(lengths),
        kv_slots=_KV_SLOTS_OF_A_REQUEST * max(loads),
        only=only or (),
        flags=flags_of(engine),
    )

    @asynccontextmanager
    async def prepare(directory: Path, say: Say) -> AsyncIterator[list[Case]]:
        async with load.started(directory, say) as (asked, groups):
            if engine is Engine.vllm:  # near ties may differ
                groups = [[replace(contender, same_as="") for contender in contenders] for contenders in groups]
            random.Random(1).shuffle(asked)
            questions = itertools.cycle(asked)
            cases = [
                case_of(contenders, questions, num_live, length, repeats)
                for num_live, length in itertools.product(loads, lengths)
                for contenders in groups
            ]
            yield at_temperatures(cases, common.temperature or _TEMPERATURES)

    results = compare(prepare, max(lengths))
    rows = [row for row in results.rows if row.contender != ALONE]
    ratios, notes = dict[str, dict[str, float]](), dict[str, dict[str, str]]()
    for row in rows:
        ratios.setdefault(row.case, {})[row.contender] = row.over_first_in_all
        notes.setdefault(row.case, {})[row.contender] = f"{row.tokens_per_s:.1f} tokens/s"
    legend = ""
    if engine is Engine.vllm:
        num_same, num_texts = sum(row.num_same for row in rows), sum(row.num_texts for row in rows)
        legend = f"{num_same} of {num_texts} texts are the target alone's; on engine vllm near ties may differ"
    tables = {"Speed over the target alone, by the time of all answers": matrix(ratios, floor)}
    chart = Heat("Speed over the target alone", ratios, notes)
    finish(common, results, tables, chart, legend, ratios=ratios, floor=floor)
    judge(ratios, floor)


if __name__ == "__main__":
    run_comparison(main, "turns", "tokens")

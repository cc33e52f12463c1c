"""``specdec bench tasks``: tokens per pass and speed over the target alone, by method of drafting and by task.

A chat model answers questions, one at a time: each question with each method in turn, and without any. A later turn
follows in the same chat. How much is drafted is chosen. Every method must give the same text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bench.harness.command import Common, run_comparison
from bench.harness.methods import ALL, ALONE, NGRAM, all_methods, as_deployed, chosen, count_help, served
from bench.harness.models import PairName
from bench.harness.questions import Question
from bench.harness.report import Say, Values, compare, conditions, finish, heat_of, matrix, values
from bench.harness.runner import Case, Contender, Results, at_temperatures

_PER_TASK, _TOKENS = 8, 64
_HELLO = Question("", ("Say hello.",))


def cases_of(questions: Sequence[Question], contenders: Sequence[Contender]) -> list[Case]:
    """A case for each task, after one that warms up."""
    warm_up = Case("warming up", [[_HELLO]], contenders, num_warm_ups=1)
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    return [warm_up, *(Case(task, [[question] for question in asked], contenders) for task, asked in by_task.items())]


def tables(results: Results) -> dict[str, Table]:
    """Both speeds, and tokens per pass; below speeds, that of all methods at once over the best other one's."""
    speeds = values(results, lambda row: row.over_first, but=ALONE)
    speeds_in_all = values(results, lambda row: row.over_first_in_all, but=ALONE)
    title = "Speed over the target alone"
    return {
        f"{title} (medians)": matrix(_with_ratio(speeds)),
        f"{title}, by the time of all answers together": matrix(_with_ratio(speeds_in_all)),
        "Tokens per pass (means)": matrix(values(results, lambda row: row.tokens_per_pass, but=ALONE)),
    }


def _with_ratio(speeds: Values) -> Values:
    singles = [of_tasks for method, of_tasks in speeds.items() if method != ALL]
    if ALL not in speeds or not singles:
        return speeds
    ratio = {task: speed / max(single[task] for single in singles) for task, speed in speeds[ALL].items()}
    return {**speeds, "all / best": ratio}


def main(
    common: Common,
    method: Annotated[list[str] | None, typer.Option(help="one of the methods; may be repeated; default: all")] = None,
    ngram: Annotated[
        Path | None, typer.Option(help="file of specdec ngram build; default: counted in Python's help() texts")
    ] = None,
) -> None:
    """Tokens per pass and speed over the target alone, by method of drafting and by task of a chat model.

    Methods: lookup, each draft, each head, history, ngram, recycling, lookahead, a head and a draft, all.
    Default models: smollm2. A running deployment is measured as it is, and without drafting.
    """
    max_tokens, temperatures = common.tokens or _TOKENS, common.temperature or [0.0]

    @asynccontextmanager
    async def prepare(directory: Path, say: Say) -> AsyncIterator[list[Case]]:
        questions = common.asked(per_task=_PER_TASK)
        async with AsyncExitStack() as stack:
            if common.is_running:
                say(conditions("a running deployment", max_tokens))
                contenders = await stack.enter_async_context(as_deployed(common))
            else:
                models = common.models(PairName.smollm2, directory)
                say(conditions(models.label, max_tokens))
                methods = chosen(all_methods(models, str(ngram or "")), method or [])
                if NGRAM in methods and not ngram:
                    methods[NGRAM] = replace(methods[NGRAM], draft=count_help(models.target, directory))
                contenders = await stack.enter_async_context(served(common, models.target, methods))
            yield at_temperatures(cases_of(questions, contenders), temperatures)

    results = compare(prepare, max_tokens)
    finish(common, results, tables(results), heat_of("Speed over the target alone", results, but=ALONE))


if __name__ == "__main__":
    run_comparison(main)

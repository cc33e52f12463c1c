"""``specdec bench distance``: the target alone, a synchronous draft and one that grows ahead, by the distance of the
draft."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bench.distance.formula import PREDICTED_MS, Prediction, predictions
from bench.distance.lab import Lab, Served, TableCosts, lab, served_tables
from bench.distance.modes import ADAPTIVE, AHEAD, ALONE, sync
from bench.distance.row import Outcomes, Row, Run
from bench.distance.situations import MAX_REQUESTS, Situation, situations
from bench.harness import runner
from bench.harness.command import Common, run_comparison
from bench.harness.endpoints import Endpoint
from bench.harness.methods import command_of
from bench.harness.models import Models, PairName, label_of
from bench.harness.questions import Question
from bench.harness.report import Lines, Panel, Say, by_case, compare, conditions, finish, heat_of
from bench.harness.runner import Case, Contender, Results
from bench.harness.windows import windows_of
from bench.models.damped_pair import Shape, damped_pair

_PROMPT_TOKENS = 64
_TOKENS, _QUICK_TOKENS = 160, 80
_DEPLOYED = Situation("as deployed", [ALONE, sync(4), sync(8), ADAPTIVE])
"""Of a running deployment, which cannot be moved."""

LEGEND = (
    "drafted, accepted: draft tokens a round; hits: the next draft tokens are there when the verdict arrives, of all"
    " verdicts, of bonuses and of corrections; on time: drafts that no round waited for"
)


_COSTS = TableCosts()

QuestionOf = Callable[[int, int], Question]
"""By the turn, and the number of a request in it."""


def three_ids(turn: int, number: int) -> Question:
    return Question("", prompt={"token_ids": {"token_ids": [1 + number, 2 + turn, 3]}})


def served_models(models: Models, common: Common, directory: Path) -> Served:
    """Services with a thread for each model. Raises StartError without a draft."""
    common = replace(common, threads=1)
    target, draft = command_of(common, "target", models.target), command_of(common, "draft", models.draft)
    if not models.is_random:
        return Served(target, draft, computes=True)
    # The same shape with another seed has unrelated weights.
    unrelated = str(damped_pair(directory, Shape(seed=1)).draft)
    return Served(target, draft, command_of(common, "draft", unrelated), computes=True)


def windows(common: Common, models: Models, num_turns: int) -> QuestionOf:
    taken = windows_of(common, models).questions(num_turns * MAX_REQUESTS, _PROMPT_TOKENS)
    return lambda turn, number: taken[turn * MAX_REQUESTS + number]


def case_of(
    situation: Situation, endpoints: Mapping[str, Endpoint], turns: Sequence[Sequence[Question]], running: Lab | None
) -> Case:
    def prepare() -> None:
        if running and situation.draft_is_there:
            running.move_draft(situation.round_trip_ms or 0.0)
        elif running:
            running.lose_draft()

    contenders = []
    for mode in situation.modes:
        fixed = {} if mode.num_draft_tokens is None else {"num_draft_tokens": mode.num_draft_tokens}
        same_as = "" if mode == ALONE else ALONE.name
        contenders.append(Contender(mode.name, endpoints[mode.front].asks(**fixed), same_as))
    case = Case(situation.name, turns, contenders, situation.temperature, num_warm_ups=1, warm_up_share=0.25)
    return replace(case, salt=situation.name, prepare=prepare)


def cases_of(
    plan: Sequence[Situation],
    endpoints: Mapping[str, Endpoint],
    question_of: QuestionOf,
    num_turns: int,
    running: Lab | None,
) -> list[Case]:
    cases = []
    for situation in plan:
        requests = range(situation.num_requests)
        turns = [[question_of(turn, number) for number in requests] for turn in range(num_turns)]
        cases.append(case_of(situation, endpoints, turns, running))
    return cases


def rows_of(results: Results, plan: Sequence[Situation], pair: str) -> list[Row]:
    by_name = {situation.name: situation for situation in plan}
    rows = []
    for row in results.rows:
        situation = by_name[row.case]
        runs = [Run(run.num_tokens, run.seconds, tuple(answer.stats for answer in run.answers)) for run in row.runs]
        where = (situation.temperature, situation.place, situation.round_trip_ms)
        rows.append(Row.of(pair, *where, row.contender, runs))
    return rows


def tables(results: Results, rows: Sequence[Row]) -> dict[str, Table]:
    """Speeds with hit rates, and the parts of a round's time."""
    row_of = {(row.case, row.contender): own for row, own in zip(results.rows, rows, strict=True)}

    def column(show: Callable[[Row], str]) -> Callable[[runner.Row], str]:
        return lambda row: show(row_of[row.case, row.contender])

    def drafting(number: Callable[[Row], float]) -> Callable[[runner.Row], str]:
        return column(lambda row: f"{number(row):.1f}" if row.on_time is not None else "")

    def ahead(rate: Callable[[Outcomes], float | None]) -> Callable[[runner.Row], str]:
        return column(lambda row: _share(rate(row.outcomes)) if row.mode == AHEAD.name else "")

    speeds = {
        "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
        "x alone": lambda row: f"{row.over_first:.2f}",
        "drafted": drafting(lambda row: row.draft_tokens_per_round),
        "accepted": drafting(lambda row: row.accepted_per_round),
        "hits": ahead(lambda outcomes: outcomes.hits),
        "bonus": ahead(lambda outcomes: outcomes.bonus_hits),
        "corr.": ahead(lambda outcomes: outcomes.correction_hits),
        "on time": column(lambda row: _share(row.on_time)),
    }
    times = {
        "draft": column(lambda row: f"{row.round_ms.draft_wait:.1f}"),
        "queue": column(lambda row: f"{row.round_ms.target_queue:.1f}"),
        "pass": column(lambda row: f"{row.round_ms.target_pass:.1f}"),
        "sampling": column(lambda row: f"{row.round_ms.target_sample:.1f}"),
        "rest": column(lambda row: f"{row.round_ms.rest:.1f}"),
        "a round": column(lambda row: f"{sum(asdict(row.round_ms).values()):.1f}"),
    }
    return {"Tokens per second": by_case(results, speeds), "Milliseconds of a round": by_case(results, times)}


def formula(predicted: Sequence[Prediction]) -> Table:
    """The fitted parameters, and the predicted and the measured time at the distance that was not fitted."""
    table = Table("", box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("s", "h", "E", "predicted", "measured", "error"):
        table.add_column(name, justify="right")
    for prediction in predicted:
        table.add_row(
            f"{prediction.mode}, T = {prediction.temperature:g}",
            f"{prediction.formula.round_ms:.1f} ms",
            _share(prediction.formula.hit_rate),
            f"{prediction.formula.tokens_per_round:.2f}",
            f"{prediction.predicted_ms_per_token:.1f} ms",
            f"{prediction.measured_ms_per_token:.1f} ms",
            f"{prediction.error:+.1%}",
        )
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _chart(rows: Sequence[Row]) -> Lines:
    panels = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.temperature == temperature and row.round_trip_ms is not None:
                lines.setdefault(row.mode, []).append((row.round_trip_ms, row.tokens_per_s))
        panels.append(Panel(f"T = {temperature:g}", "round trip to the draft, ms", lines))
    return Lines("Tokens per second with the draft at a distance", panels)


def main(
    common: Common,
    pass_ms: Annotated[float, typer.Option(help="of a pass of the table target")] = _COSTS.pass_ms,
    step_ms: Annotated[float, typer.Option(help="of a draft step, for any number of nodes")] = _COSTS.step_ms,
    acceptance: Annotated[float, typer.Option(help="of the table pair")] = _COSTS.acceptance,
    runner_up: Annotated[
        float, typer.Option(help="how often the table pair's second candidate is right when the first is wrong")
    ] = _COSTS.runner_up,
    row_us: Annotated[float, typer.Option(help="of each row of a pass of the table target")] = _COSTS.row_us,
    num_ahead_tokens: Annotated[int, typer.Option(help="the orchestrator's setting in the mode ahead")] = 60,
    repeats: Annotated[int, typer.Option(min=1, help="turns; medians are shown")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="one turn of fewer tokens and modes")] = False,
) -> None:
    """Tokens per second of the target alone, a synchronous draft and one that grows ahead, by the draft's distance.

    Default models: table. A running deployment cannot be moved: it is measured where it is.
    """
    max_tokens = common.tokens or (_QUICK_TOKENS if quick else _TOKENS)
    temperatures = common.temperature or [0.0, 1.0]
    of_tables = not common.is_running and common.target is None and common.pair in (None, PairName.table)
    label = "a running deployment" if common.is_running else label_of(PairName.table)
    plan: list[Situation] = []

    @asynccontextmanager
    async def prepare(directory: Path, say: Say) -> AsyncIterator[list[Case]]:
        nonlocal label
        num_turns = 2 if quick else 1 + repeats
        if common.is_running:
            say(conditions(label, max_tokens))
            asked = common.asked("python")
            plan.extend(replace(_DEPLOYED, temperature=temperature) for temperature in temperatures)
            async with common.endpoint() as endpoint:
                question_of: QuestionOf = lambda turn, number: asked[(turn + number) % len(asked)]  # noqa: E731
                yield cases_of(plan, {ALONE.front: endpoint}, question_of, num_turns, None)
            return
        if of_tables:
            served, question_of = served_tables(TableCosts(pass_ms, step_ms, acceptance, runner_up, row_us)), three_ids
        else:
            models = common.models(PairName.damped, directory)
            label = models.label
            served, question_of = served_models(models, common, directory), windows(common, models, num_turns)
        say(conditions(label, max_tokens))
        plan.extend(situations(temperatures, quick, with_unrelated=bool(served.unrelated)))
        async with lab(served, num_ahead_tokens) as running:
            yield cases_of(plan, running.endpoints, question_of, num_turns, running)

    results = compare(prepare, max_tokens)
    rows = rows_of(results, plan, label)
    shown = tables(results, rows)
    if predicted := predictions(rows):
        shown[f"Time per token by the formula, fitted on the other distances, at {PREDICTED_MS:g} ms"] = formula(
            predicted
        )
    measured = {"distances": [asdict(row) for row in rows], "formula": [asdict(prediction) for prediction in predicted]}
    chart = heat_of("Speed over the target alone", results) if common.is_running else _chart(rows)
    finish(common, results, shown, chart, LEGEND, **measured)


if __name__ == "__main__":
    run_comparison(main, "head", "threads")

"""``specdec bench load``: what drafting gives at growing load.

A pair of models answers 1 to 128 requests at the same time. Without a pair, these are table models behind the real
services: a pass takes a fixed time and some for each row, as on a GPU. So draft tokens cost little next to one request
and much next to a hundred. How much is drafted is chosen; every text is compared.

For table models there is the formula of the policy (specdec/speculation/cost.py): the number of draft tokens with the
most tokens per second, where all requests have equally many, or none.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bench.harness.command import Common, run_comparison
from bench.harness.deployment import Processes
from bench.harness.explain import COLUMNS, LEGEND, TITLE, endpoint_of
from bench.harness.methods import ALONE, KV_SLOTS, against_alone, as_deployed, chosen, served, with_models
from bench.harness.models import PairName, label_of
from bench.harness.questions import Question
from bench.harness.report import Lines, Panel, Say, Values, by_case, compare, conditions, finish, matrix, values
from bench.harness.runner import Case, Contender, Results, at_temperatures
from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.speculation.cost import best_number, chain_chances, expected_tokens

PASS_MS, ROW_US, STEP_MS, ACCEPTANCE, PERIOD = 20.0, 150.0, 1.0, 0.75, 32
"""Of the table models."""
_TABLE_TOKENS, _TOKENS = 160, 64
_KV_SLOTS_OF_A_REQUEST = 512


def pass_ms(rows: int) -> float:
    return PASS_MS + ROW_US * rows / 1e3


def formula(method: str, requests: int, tokens: int) -> float:
    """The speed over the target alone."""
    repeats = method == "lookup"  # all is right once the text has begun to repeat itself
    chances = itertools.repeat(1.0) if repeats else chain_chances([ACCEPTANCE])
    expected = expected_tokens(chances, MAX_DRAFT_TOKENS)
    step_ms = STEP_MS if method == "draft" else 0.0

    def round_ms(number: int) -> float:
        return step_ms * number + pass_ms(requests * (number + 1))

    best = best_number(expected, round_ms, range(len(expected)))
    token_ms, alone_ms = round_ms(best) / expected[best], pass_ms(requests)
    if repeats:
        token_ms = (PERIOD * alone_ms + (tokens - PERIOD) * token_ms) / tokens
    return alone_ms / token_ms


async def table_contenders(processes: Processes, only: Sequence[str] = ()) -> list[list[Contender]]:
    """By method, each next to its own target alone: one target's text repeats itself, another one has a head. ``only``:
    names of methods; empty: all. Raises ValueError for an unknown name."""
    text = [f"--acceptance={ACCEPTANCE}", "--max-sequences=4096"]
    target = ("testing.table_service target", f"--pass-ms={PASS_MS}", f"--row-us={ROW_US}", *text)
    draft = ("testing.table_service draft", f"--pass-ms={STEP_MS}", *text)
    deployments = {
        "lookup": ((*target, f"--period={PERIOD}"), ()),
        "draft": (target, draft),
        "head": ((*target, "--self-drafts"), ()),
    }
    contenders = []
    for name, (of_target, of_draft) in chosen(deployments, only).items():
        endpoint = await endpoint_of(processes, of_target, of_draft, salted=False)
        contenders.append(against_alone(endpoint, {name: endpoint}))
    return contenders


@dataclass(frozen=True, slots=True)
class Load:
    """What answers: table models, a running deployment, or the models of the flags with the methods ``only`` (empty:
    all), with ``flags`` of both models."""

    common: Common
    of_tables: bool
    max_tokens: int
    kv_slots: int
    only: Sequence[str] = ()
    flags: tuple[str, ...] = ()
    with_metrics: bool = False

    @asynccontextmanager
    async def started(self, directory: Path, say: Say) -> AsyncIterator[tuple[list[Question], list[list[Contender]]]]:
        """The questions, and groups of contenders, each with a target alone. Raises StartError, and ValueError for an
        unknown method."""
        common, stack = self.common, AsyncExitStack()
        async with stack:
            if self.of_tables:
                say(conditions(label_of(PairName.table), self.max_tokens))
                questions = [Question("", prompt={"token_ids": {"token_ids": [1, 2, seed]}}) for seed in range(1024)]
                processes = await stack.enter_async_context(Processes(self.with_metrics))
                yield questions, await table_contenders(processes, self.only)
            elif common.is_running:
                say(conditions("a running deployment", self.max_tokens))
                yield common.asked(), [await stack.enter_async_context(as_deployed(common))]
            else:
                models = common.models(PairName.smollm2, directory)
                say(conditions("; ".join([models.label, *self.flags[:1]]), self.max_tokens))
                methods, options = chosen(with_models(models), self.only), (self.flags, self.with_metrics)
                services = served(common, models.target, methods, max(KV_SLOTS, self.kv_slots), *options)
                yield common.asked(), [await stack.enter_async_context(services)]


def case_of(num_requests: int, contenders: Sequence[Contender], questions: Sequence[Question], repeats: int) -> Case:
    """After one turn in which the policy learns. Every turn has other questions, as long as there are any."""
    turns = [
        [questions[(turn * num_requests + index) % len(questions)] for index in range(num_requests)]
        for turn in range(1 + repeats)
    ]
    return Case(f"{num_requests}", turns, contenders, num_warm_ups=1)


def over_alone(results: Results, tokens: int, with_formula: bool) -> dict[str, dict[str, float]]:
    """The speed over the target alone, by method and number of requests."""
    ratios: dict[str, dict[str, float]] = {}
    for row in results.rows:
        if row.contender == ALONE:
            continue
        ratios.setdefault(row.contender, {})[row.case] = row.over_first
        if with_formula:
            by_formula = formula(row.contender, _number(row.case), tokens)
            ratios.setdefault(f"  formula, {row.contender}", {})[row.case] = by_formula
    return ratios


def _number(case: str) -> int:
    """Of requests."""
    return int(case.partition(",")[0])


def _chart(ratios: Values) -> Lines:
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, of_cases in ratios.items():
        for case, ratio in of_cases.items():
            _, _, temperature = case.partition(",")
            lines.setdefault(f"{name}{temperature}", []).append((_number(case), ratio))
    panel = Panel("Speed over the target alone", "requests at the same time", lines)
    return Lines("What drafting gives at growing load", [panel], logarithmic=True)


def main(
    common: Common,
    requests: Annotated[str, typer.Option(help="numbers of concurrent requests, separated by commas")] = "1,8,32,128",
    repeats: Annotated[int, typer.Option(min=1, help="turns; medians are shown")] = 1,
    explain: Annotated[bool, typer.Option("--explain", help="show where the time goes, by service")] = False,
) -> None:
    """Tokens per second over the target alone by the number of requests, with lookup, with drafts, and with heads.

    Default models: table models, next to the formula. A running deployment is measured as it is, and without drafting.
    """
    if explain and common.is_running:
        raise typer.BadParameter("--explain needs services that this command starts, not --url or --address")
    loads = [int(number) for number in requests.split(",")]
    of_tables = not common.is_running and common.target is None and common.pair in (None, PairName.table)
    max_tokens = common.tokens or (_TABLE_TOKENS if of_tables else _TOKENS)
    load = Load(common, of_tables, max_tokens, _KV_SLOTS_OF_A_REQUEST * max(loads), with_metrics=explain)

    @asynccontextmanager
    async def prepare(directory: Path, say: Say) -> AsyncIterator[list[Case]]:
        async with load.started(directory, say) as (asked, groups):
            cases = [case_of(number, contenders, asked, repeats) for number in loads for contenders in groups]
            yield at_temperatures(cases, common.temperature or [1.0 if of_tables else 0.0])

    results = compare(prepare, max_tokens)
    ratios = over_alone(results, max_tokens, with_formula=of_tables)
    speeds = values(results, lambda row: row.tokens_per_s, but=ALONE if of_tables else "")
    tables = {
        "Tokens per second of all requests, by their number": matrix(speeds),
        "Speed over the target alone, by the number of requests": matrix(ratios),
    }
    if explain:
        tables[TITLE] = by_case(results, COLUMNS)
    finish(common, results, tables, _chart(ratios), LEGEND if explain else "", over_alone=ratios)


if __name__ == "__main__":
    run_comparison(main)

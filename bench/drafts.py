"""``specdec bench drafts``: what a smaller or larger draft of a target is worth.

    specdec bench drafts --target MODEL --draft SMALL --draft LARGE --chart drafts.png

Each prompt is continued with each draft, or head, with fixed numbers of draft tokens and with the chosen number, and by
the target alone. All texts must be equal. The drafts share this machine with their target; only one works at a time.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rich.table import Table
from safetensors import safe_open

from bench.harness.command import Common, run_comparison
from bench.harness.deployment import Processes
from bench.harness.endpoints import Endpoint
from bench.harness.methods import ALONE, Serving, with_models
from bench.harness.models import Models, PairName
from bench.harness.questions import Question
from bench.harness.report import Lines, Panel, Say, Values, compare, conditions, finish, matrix, values
from bench.harness.runner import Case, Contender, Results, at_temperatures
from specdec.runner.files import directory_of

NUMBERS = (1, 2, 4, 8)
"""Of draft tokens."""
CHOSEN = "chosen"
_TOKENS = 64


def num_parameters(model: str) -> int:
    """The numbers in a checkpoint's tensors; 0 for an n-gram model. Raises ValueError if there is no checkpoint."""
    if Path(model).is_file():
        return 0
    try:
        files = sorted(directory_of(model).glob("*.safetensors"))
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error
    if not files:
        raise ValueError(f"{model} is no checkpoint: it has no safetensors file")
    total = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total


def sizes_of(models: Models) -> dict[str, int]:
    """Parameters of each draft and head, by its name. Raises ValueError."""
    methods = with_models(models)
    return {
        name: num_parameters(method.draft or method.target.removeprefix("--head="))
        for name, method in methods.items()
        if method.draft or method.target
    }


def case_of(name: str, endpoint: Endpoint, questions: list[Question]) -> Case:
    """The first question is asked twice, to warm up."""
    contenders = [Contender(ALONE, endpoint.asks(num_draft_tokens=0, ignore_eos=True))]
    for number in NUMBERS:
        contenders.append(Contender(f"K = {number}", endpoint.asks(num_draft_tokens=number, ignore_eos=True), ALONE))
    contenders.append(Contender(CHOSEN, endpoint.asks(ignore_eos=True), ALONE))
    return Case(name, [[question] for question in (questions[0], *questions)], contenders, num_warm_ups=1, salt=name)


def by_parameters(results: Results, shares: Mapping[str, float]) -> Values:
    """The speed over the target alone if a pass took as long as its model has parameters, as it does where memory
    bandwidth is the limit, and messages took no time. ``shares``: the drafts' parameters over the target's."""
    lengths = values(results, lambda row: row.tokens_per_pass, but=ALONE)
    return {
        f"K = {number}": {
            case: length / (1 + number * shares[case.partition(",")[0]])
            for case, length in lengths[f"K = {number}"].items()
        }
        for number in NUMBERS
    }


def tables(results: Results, shares: Mapping[str, float]) -> dict[str, Table]:
    shown: dict[str, Values] = {
        "Tokens per round, by the number of draft tokens": values(results, lambda row: row.tokens_per_pass, ALONE),
        "Accepted share of the draft tokens": values(results, lambda row: row.acceptance, ALONE),
        "Speed over the target alone, here (medians)": values(results, lambda row: row.over_first, ALONE),
    }
    if shares:
        shown["Speed where time grows with parameters"] = by_parameters(results, shares)
    return {title: matrix(figures) for title, figures in shown.items()}


def _chart(results: Results, shares: Mapping[str, float]) -> Lines:
    """Over the size of the draft; of a running deployment over the number of draft tokens."""
    lengths = values(results, lambda row: row.tokens_per_pass, but=ALONE)
    if not shares:
        points = [(float(number), length) for number in NUMBERS for length in lengths[f"K = {number}"].values()]
        return Lines("What the draft gives", [Panel("Tokens per round", "draft tokens", {"as deployed": points})])

    def lines(figures: Values) -> dict[str, list[tuple[float, float]]]:
        places = {case: round(100 * shares[case.partition(",")[0]], 1) for case in results.cases}
        return {name: [(places[case], figure) for case, figure in figures[name].items()] for name in by_size}

    by_size, across = by_parameters(results, shares), "the draft's parameters, in % of the target's"
    panels = [
        Panel("Tokens per round", across, lines(lengths)),
        Panel("Speed where time grows with parameters", across, lines(by_size)),
    ]
    return Lines("How large a draft", panels, logarithmic=all(shares.values()))


def main(common: Common) -> None:
    """Tokens per round and speed over the target alone, by draft and by the number of draft tokens.

    Default models: demo. --draft and --head may be repeated. The chosen number has prompt lookup as well.
    """
    max_tokens, shares = common.tokens or _TOKENS, {}

    @asynccontextmanager
    async def prepare(directory: Path, say: Say) -> AsyncIterator[list[Case]]:
        asked = common.asked("python")
        async with AsyncExitStack() as stack:
            if common.is_running:
                say(conditions("a running deployment", max_tokens))
                cases = [case_of("as deployed", await stack.enter_async_context(common.endpoint()), asked)]
            else:
                models = common.models(PairName.demo, directory)
                say(conditions(models.label, max_tokens))
                size, sizes = num_parameters(models.target), sizes_of(models)
                say(f"target: {size / 1e6:.2f} M parameters")
                for name, each in sizes.items():
                    say(f"{name}: {each / 1e6:.2f} M parameters ({each / size:.0%})")
                shares.update({name: each / size for name, each in sizes.items()})
                serving = Serving(await stack.enter_async_context(Processes()), common, models.target)
                methods = with_models(models)
                cases = [case_of(name, await serving.endpoint(methods[name]), asked) for name in sizes]
            yield at_temperatures(cases, common.temperature or [0.0])

    results = compare(prepare, max_tokens)
    finish(common, results, tables(results, shares), _chart(results, shares), shares=shares)


if __name__ == "__main__":
    run_comparison(main)

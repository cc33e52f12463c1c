"""``specdec bench capacity``: how many clients a target serves within a given time per token.

Alone; with a draft on the target's device, where their passes take turns; and with a draft on a device of its own. By
default table models sleep as long as the passes of a real deployment take (``--target-pass`` and ``--draft-pass``, as
in ``specdec plan``). A real pair has a core each, or one core together, and one thread per model.

Next to it is the closed form of "Speculation at a Distance" (arXiv 2606.25091): if rounds of different clients fill
the time of each other's drafts, a device of its own for the draft gives 1 + K t_draft / t_target times as many clients.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from bench.harness.command import Common, run_comparison
from bench.harness.deployment import Processes, pin, pinned_here
from bench.harness.endpoints import Endpoint, OverGrpc
from bench.harness.methods import ALONE, command_of
from bench.harness.models import Models, PairName, label_of
from bench.harness.questions import Question
from bench.harness.report import Lines, Panel, Say, compare, conditions, finish, matrix, values
from bench.harness.runner import Case, Contender, Window
from bench.harness.windows import case_in_window
from specdec.planner.pass_time import PassTime

SHARED, REMOTE = "draft on its device", "draft on another one"
_TABLE_TOKENS, _TOKENS = 64, 48
_WINDOW_TOKENS = 48
"""For each client."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Passes of a target and steps of a draft (see PassTime.parse)."""

    target: str
    draft: str
    acceptance: float

    def gain(self, num_clients: int, num_draft_tokens: int) -> float:
        """Of a draft's own device, by the closed form."""
        target = PassTime.parse(self.target).seconds(num_clients * (num_draft_tokens + 1))
        return 1 + num_draft_tokens * PassTime.parse(self.draft).seconds(num_clients) / target

    async def served(self, processes: Processes, directory: Path) -> dict[str, Endpoint]:
        """Raises StartError."""
        endpoints: dict[str, Endpoint] = {}
        for name, device in ((SHARED, directory / "device"), (REMOTE, "")):
            of_both = (f"--acceptance={self.acceptance}", f"--device={device}", "--max-sequences=4096")
            target = ("testing.table_service target", f"--curve={self.target}", *of_both)
            draft = ("testing.table_service draft", f"--curve={self.draft}", *of_both)
            _, client = await processes.deployment(target, draft)
            endpoints[name] = OverGrpc(client, salted=False)
        return endpoints


async def served_pair(processes: Processes, common: Common, models: Models, kv_slots: int) -> dict[str, Endpoint]:
    """A real target and draft, both on core 0, and likewise with the draft on core 1, as everything else is. Raises
    StartError."""
    common, endpoints = replace(common, threads=1), dict[str, Endpoint]()
    for name, core in ((SHARED, 0), (REMOTE, 1)):
        target = await processes.model(*command_of(common, "target", models.target, kv_slots=kv_slots))
        draft = await processes.model(*command_of(common, "draft", models.draft, kv_slots=kv_slots))
        flags = (f"--target={target.address}", f"--draft={draft.address}", f"--tokenizer={models.target}")
        front, client = await processes.orchestrator(*flags)
        for service, own_core in ((target, 0), (draft, core), (front, 1)):
            pin(service.process.pid, {own_core})
        endpoints[name] = OverGrpc(client)
    return endpoints


def contenders_of(endpoints: Mapping[str, Endpoint], num_draft_tokens: int) -> list[Contender]:
    """The target alone, and both places of the draft, each with a fixed number of draft tokens and with chosen ones."""
    contenders = [Contender(ALONE, endpoints[REMOTE].asks(num_draft_tokens=0))]
    for name, endpoint in endpoints.items():
        fixed = endpoint.asks(num_draft_tokens=num_draft_tokens)
        contenders += [
            Contender(f"{name}, K = {num_draft_tokens}", fixed, ALONE),
            Contender(name, endpoint.asks(), ALONE),
        ]
    return contenders


def capacity(token_ms: Mapping[int, float], limit_ms: float) -> float:
    """Clients up to which a token takes ``limit_ms`` at most, between the measured numbers by a straight line. 0: not
    even for the smallest number; the largest number if it is never exceeded."""
    numbers = sorted(token_ms)
    if token_ms[numbers[0]] > limit_ms:
        return 0.0
    for fewer, more in pairwise(numbers):
        if token_ms[more] > limit_ms:
            share = (limit_ms - token_ms[fewer]) / (token_ms[more] - token_ms[fewer])
            return fewer + share * (more - fewer)
    return float(numbers[-1])


def main(
    common: Common,
    clients: Annotated[str, typer.Option(help="numbers of them, separated by commas")] = "1,8,16,32",
    token_ms: Annotated[float, typer.Option(min=0.1, help="milliseconds that a token of a client may take")] = 100.0,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k", min=1, help="where it is fixed")] = 4,
    target_pass: Annotated[str, typer.Option(help="ms: MS, MS+MS per row, or ROWS:MS,...")] = "60+1.5",
    draft_pass: Annotated[str, typer.Option(help="likewise of a draft step; a row is a client")] = "12",
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="of the table models")] = 0.8,
    repeats: Annotated[int, typer.Option(min=1, help="turns; medians are shown")] = 1,
) -> None:
    """How many clients a target serves within a time per token: alone, and with a draft on its device or on another.

    Default models: table models with the pass times of the flags.
    """
    numbers = [int(number) for number in clients.split(",")]
    curves = Curves(target_pass, draft_pass, acceptance)
    of_tables = common.target is None and common.pair in (None, PairName.table)
    max_tokens = common.tokens or (_TABLE_TOKENS if of_tables else _TOKENS)

    @asynccontextmanager
    async def prepare(directory: Path, say: Say) -> AsyncIterator[list[Case]]:
        async with AsyncExitStack() as stack:
            processes = await stack.enter_async_context(Processes())
            if of_tables:
                say(conditions(label_of(PairName.table), max_tokens))
                asked = [Question("", prompt={"token_ids": {"token_ids": [1, 2, seed]}}) for seed in range(1024)]
                endpoints = await curves.served(processes, directory)
            else:
                models = common.models(PairName.demo, directory)
                say(conditions(models.label, max_tokens))
                asked = common.asked()
                endpoints = await served_pair(processes, common, models, 1024 * max(numbers))
                stack.enter_context(pinned_here({1}))
            contenders, draw = contenders_of(endpoints, num_draft_tokens), random.Random(1)

            def take(count: int) -> list[Question]:
                return draw.choices(asked, k=count)

            yield [
                case_in_window(
                    f"{number}",
                    contenders,
                    take,
                    window=Window(number, number * _WINDOW_TOKENS),
                    max_tokens=max_tokens,
                    repeats=repeats,
                )
                for number in numbers
            ]

    results = compare(prepare, max_tokens)
    speeds = values(results, lambda row: row.tokens_per_s / int(row.case))
    by_number = {name: {int(case): 1e3 / speed for case, speed in of.items()} for name, of in speeds.items()}
    served = {name: {"clients": capacity(of_numbers, token_ms)} for name, of_numbers in by_number.items()}
    for of_name in served.values():
        of_name["over alone"] = of_name["clients"] / max(1e-9, served[ALONE]["clients"])
    legend = ""
    if of_tables:
        number = max(1, round(served[f"{SHARED}, K = {num_draft_tokens}"]["clients"]))
        gain = curves.gain(number, num_draft_tokens)
        legend = (
            f"1 + K t_draft / t_target is {gain:.2f} for K = {num_draft_tokens} and {number} clients: so many times as"
            " many as with the draft on the target's device, if drafting fits into other clients' passes"
        )
    tables = {
        "Tokens per second of each client, by their number": matrix(speeds),
        f"Clients at {token_ms:g} ms per token at most": matrix(served),
    }
    panel = Panel("Milliseconds per token", "clients", {name: sorted(line.items()) for name, line in by_number.items()})
    chart = Lines("How many clients a target serves", [panel], logarithmic=True)
    finish(common, results, tables, chart, legend, served=served, token_ms=token_ms)


if __name__ == "__main__":
    run_comparison(main, "url", "address", "head", "turns", "temperature")

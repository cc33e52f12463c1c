"""``specdec bench differential``: random requests over HTTP and gRPC, with and without speculation: options, grammars,
tools, reasoning, conversations of several turns.

The pair in the repository answers each request alone, and then with each source of draft tokens. All answers must be
equal, field by field, and so must be the rest of an answer that is resumed. A difference is made smaller: every option
that it does not need is left out.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx2 as httpx
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.differential.requests import Asked, draw
from bench.harness.command import Common, run_benchmark
from bench.harness.deployment import Processes
from bench.harness.methods import ALONE, Method, Serving, all_methods, count_help
from bench.harness.models import PairName, pair_of
from specdec.cli.processes import StartError, free_ports, listening, service
from specdec.client import Client
from testing.answers import answer_of
from testing.patience import LONG_PATIENCE_S

SOURCES = ("draft", "ngram", "lookup", "recycling", "lookahead", "resumed")
"""Of draft tokens. A resumed answer is drafted as with ``draft``."""

_NEEDED = {"prompt", "messages", "text", "token_ids", "chat", "max_tokens", "seed", "temperature"}
"""Without these the answer would be another one."""
Ask = Callable[[str, str, dict[str, Any]], Any]
"""By source, path and fields."""


class Difference(NamedTuple):
    number: int
    source: str
    fields: dict[str, Any]
    places: list[str]


@asynccontextmanager
async def running(sources: Sequence[str], threads: int) -> AsyncIterator[Ask]:
    """Asks the pair in the repository. Raises StartError."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-bench-")))
        models = pair_of(PairName.demo, directory)
        methods = {ALONE: Method()} | all_methods(models, count_help(models.target, directory))
        names = sorted({_method(source) for source in (ALONE, *sources)})
        serving = Serving(await stack.enter_async_context(Processes()), Common(threads=threads), models.target)
        clients: dict[str, tuple[Client, httpx.AsyncClient]] = {}
        for name, port in zip(names, free_ports(len(names)), strict=True):
            behind, client = await serving.start(methods[name])
            flags = [f"--orchestrator={behind.address}", "--reasoning-format=think", "--log-level=WARNING"]
            await listening(await stack.enter_async_context(service("gateway", port, flags)))
            http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LONG_PATIENCE_S)
            clients[name] = client, await stack.enter_async_context(http)

        async def ask(source: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
            return await answer_of(*clients[_method(source)], path, fields)

        yield ask


def _method(source: str) -> str:
    """By which the source is served."""
    return {"lookup": ALONE, "resumed": "draft"}.get(source, source)


async def _ask_with(ask: Ask, source: str, asked: Asked, alone: dict[str, Any], chance: random.Random) -> list[str]:
    """Where the answer with a source differs from the one without."""
    fields, expected = dict(asked.fields), alone
    if source == "lookup":
        fields.pop("verification", None)  # refused beside a prediction; a greedy text does not depend on it
        guess = chance.choice((json.dumps(alone, ensure_ascii=False), "x = 1\n" * 9, "self.path"))
        fields["prediction"] = {"type": "content", "content": guess} if asked.path else guess
    elif (number := chance.choice((None, 1, 5, 16))) is not None:
        fields["num_draft_tokens"] = number
    if source == "resumed" and "samples" in alone:
        samples = alone["samples"].items()
        cuts = {index: _cut(sample["ends"], chance) for index, sample in samples}
        fields["resume"] = {index: {"token_ids": sample["ids"][: cuts[index]]} for index, sample in samples}
        expected = alone | {"samples": {index: _behind(sample, cuts[index]) for index, sample in samples}}
    return differences(expected, await ask(source, asked.path, fields))


def _cut(ends: list[int], chance: random.Random) -> int:
    """A number of ids after which a client could have lost the server: never within a character, and not all of them,
    as a finished answer is not computed anew."""
    cut = chance.randint(0, max(0, len(ends) - 1))
    while cut and ends[cut - 1] == ends[cut]:
        cut -= 1
    return cut


def _behind(sample: dict[str, Any], cut: int) -> dict[str, Any]:
    """The rest of a sample."""
    begun = sample["ends"][cut - 1] if cut else 0
    rest = {name: sample[name][cut:] for name in ("ids", "ends", "logprobs")}
    return sample | rest | {"text": sample["text"][begun:]}


def differences(first: Any, second: Any, place: str = "") -> list[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        names = [*first, *(name for name in second if name not in first)]
        pairs = [(first.get(name), second.get(name), f"{place}.{name}") for name in names]
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = [(a, b, f"{place}[{at}]") for at, (a, b) in enumerate(zip(first, second, strict=True))]
    else:
        return [] if first == second else [f"{place}: {first!r} alone, {second!r}"[:300]]
    return [difference for pair in pairs for difference in differences(*pair)]


async def _smaller(ask: Ask, source: str, asked: Asked, seed: str) -> tuple[Asked, list[str]]:
    """The same difference with as few options as possible."""
    differing: list[str] = []

    async def differs(tried: Asked) -> list[str]:
        alone = await ask(ALONE, tried.path, {**tried.fields, "num_draft_tokens": 0})
        return await _ask_with(ask, source, tried, alone, random.Random(seed))

    for name in sorted(asked.fields.keys() - _NEEDED):
        tried = asked._replace(fields={key: value for key, value in asked.fields.items() if key != name})
        if places := await differs(tried):
            asked, differing = tried, places
    return asked, differing


async def compare(
    ask: Ask, seed: int, numbers: Sequence[int], sources: Sequence[str], done: Callable[[], None]
) -> tuple[Counter[tuple[str, str]], list[Difference]]:
    """How many requests of each API were asked, refused and different with a source, and all differences."""
    counts: Counter[tuple[str, str]] = Counter()
    differing = []
    for number in numbers:
        asked = draw(random.Random(f"{seed}/{number}"))
        alone = await ask(ALONE, asked.path, {**asked.fields, "num_draft_tokens": 0})
        counts[asked.api, "asked"] += 1
        counts[asked.api, "refused"] += alone.get("status", 200) != 200

        async def one(source: str, number: int = number, asked: Asked = asked, alone: Any = alone) -> None:
            drawn = f"{seed}/{number}/{source}"
            if places := await _ask_with(ask, source, asked, alone, random.Random(drawn)):
                counts[asked.api, source] += 1
                small, small_places = await _smaller(ask, source, asked, drawn)
                differing.append(Difference(number, source, small.fields, small_places or places))

        await asyncio.gather(*(one(source) for source in sources))
        done()
    return counts, differing


def _table(counts: Counter[tuple[str, str]], sources: Sequence[str]) -> Table:
    table = Table("", "gRPC", "HTTP", header_style="bold")
    for name in ("asked", "refused", *sources):
        title = name if name in ("asked", "refused") else f"different with {name}"
        table.add_row(title, *(f"{counts[api, name]}" for api in ("gRPC", "HTTP")))
    return table


def main(
    requests: Annotated[int, typer.Option(min=1, help="random requests")] = 200,
    seed: Annotated[int, typer.Option(help="of the requests")] = 1,
    only: Annotated[int | None, typer.Option(min=0, help="ask this one of them alone")] = None,
    sources: Annotated[str, typer.Option(help="some of the sources, separated by commas")] = ",".join(SOURCES),
    threads: Annotated[int, typer.Option(min=1, help="of each model")] = 1,
) -> None:
    """Random requests over HTTP and gRPC, with and without speculation, compared field by field.

    The exit status is 1 if an answer differs; then its smallest form is shown.
    """
    console, names = Console(highlight=False), sources.split(",")
    if unknown := sorted(set(names) - set(SOURCES)):
        raise typer.BadParameter(f"there is no source {unknown[0]}: {', '.join(SOURCES)}")
    numbers = range(requests) if only is None else [only]

    async def work() -> tuple[Counter[tuple[str, str]], list[Difference]]:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("Asking", total=len(numbers))
            async with running(names, threads) as ask:
                return await compare(ask, seed, numbers, names, lambda: progress.advance(bar))

    try:
        counts, differing = asyncio.run(work())
    except StartError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    console.print(_table(counts, names))
    for difference in differing:
        again = f"--seed {seed} --only {difference.number} --sources {difference.source}"
        console.print(f"specdec bench differential {again}")
        for line in (json.dumps(difference.fields), *difference.places[:3]):
            console.print(f"  {line}", markup=False)
    raise typer.Exit(1 if differing else 0)


if __name__ == "__main__":
    run_benchmark(main)

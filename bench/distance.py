"""``specdec bench distance``: what the way to the draft costs, and how much of it growing ahead hides.

A fault proxy stands between orchestrator and draft and delays every byte. With the table pair passes take a set time
asleep, so that target and draft never share a core; with the damped pair they are real, the target alone on core 0
and everything else on core 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.damped_pair import Shape, damped_pair
from bench.fault_proxy import FaultProxy
from specdec.client import Client
from specdec.processes import Service, StartError, free_ports, healthy, paired, service

_ROUND_TRIPS_MS = (0.0, 1.0, 5.0, 20.0, 50.0)
_FIXED = (4, 6, 8)
_STREAMS = 32


class PairName(StrEnum):
    table = "table"
    damped = "damped"


@dataclass(frozen=True, slots=True)
class Mode:
    """``front`` is the orchestrator that is asked; None draft tokens: as many as pay."""

    name: str
    front: str
    num_draft_tokens: int | None


_ALONE = Mode("alone", "near", 0)
_AHEAD = Mode("ahead", "ahead", None)
_SYNC = [Mode(f"sync, K = {count}", "near", count) for count in _FIXED]
_MODES = [_ALONE, *_SYNC, Mode("sync, adaptive", "near", None), _AHEAD]


@dataclass(frozen=True, slots=True)
class TablePair:
    """``step_ms`` is of a draft pass, whatever it grows."""

    pass_ms: float
    step_ms: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class Row:
    """One mode in one situation: medians."""

    situation: str
    mode: str
    tokens_per_s: float
    draft_tokens_per_round: float
    accepted_per_round: float


def main(
    pair: Annotated[PairName, typer.Option(help="table: passes that sleep; damped: a real model")] = PairName.table,
    pass_ms: Annotated[float, typer.Option(help="of the table target")] = 40.0,
    step_ms: Annotated[float, typer.Option(help="of the table draft, for one node or many")] = 4.0,
    acceptance: Annotated[float, typer.Option(help="of the table pair")] = 0.8,
    num_ahead_tokens: Annotated[int, typer.Option(help="the orchestrator's setting in the mode ahead")] = 60,
    tokens: Annotated[int, typer.Option(help="per run")] = 160,
    repeats: Annotated[int, typer.Option(help="runs of each mode, in turns; medians are shown")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="one short run each: within 4 minutes")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Compare target alone, a synchronous draft and one that grows ahead, at growing distances to the draft."""
    console = Console()
    if quick:
        tokens, repeats = min(tokens, 80), 1
    try:
        rows = asyncio.run(
            _measure(console, pair, TablePair(pass_ms, step_ms, acceptance), num_ahead_tokens, tokens, repeats)
        )
    except StartError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    console.print(_table(rows))
    ratios = _ratios(rows)
    console.print_json(json.dumps(ratios))
    if json_file:
        result = {"pair": pair.value, "rows": [asdict(row) for row in rows], "ratios": ratios}
        Path(json_file).write_text(json.dumps(result, indent=1) + "\n")


def _situation(round_trip_ms: float) -> str:
    return f"{round_trip_ms:g} ms"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("draft", "mode", "tokens/s", "x alone", "drafted", "accepted"):
        table.add_column(column, justify="left" if column in ("draft", "mode") else "right")
    alone = {row.situation: row.tokens_per_s for row in rows if row.mode == _ALONE.name}
    before = ""
    for row in rows:
        table.add_row(
            row.situation if row.situation != before else "",
            row.mode,
            f"{row.tokens_per_s:.1f}",
            f"{row.tokens_per_s / alone[row.situation]:.2f}",
            f"{row.draft_tokens_per_round:.1f}",
            f"{row.accepted_per_round:.1f}",
        )
        before = row.situation
    return table


def _ratios(rows: Sequence[Row]) -> dict[str, float]:
    rate: dict[tuple[str, str], float] = {(row.situation, row.mode): row.tokens_per_s for row in rows}

    def at(round_trip_ms: float, mode: Mode) -> float:
        return rate[_situation(round_trip_ms), mode.name]

    def over_sync(round_trip_ms: float) -> float:
        return at(round_trip_ms, _AHEAD) / max(at(round_trip_ms, mode) for mode in _SYNC)

    situations = dict.fromkeys(row.situation for row in rows)
    ratios = {
        "worst_over_alone": min(rate[each, _AHEAD.name] / rate[each, _ALONE.name] for each in situations),
        "ahead_over_sync_rtt20": over_sync(20),
        "ahead_over_alone_rtt20": at(20, _AHEAD) / at(20, _ALONE),
        "ahead_over_sync_rtt50": over_sync(50),
        "ahead_over_sync_rtt0": over_sync(0),
        "ahead_rtt20_over_rtt0": at(20, _AHEAD) / at(0, _AHEAD),
    }
    return {name: round(ratio, 3) for name, ratio in ratios.items()}


@dataclass(slots=True)
class _Lab:
    """Running services: a client of each orchestrator, by name, and the way to the draft."""

    clients: dict[str, Client]
    proxy: FaultProxy

    async def run(self, mode: Mode, streams: int, max_tokens: int, seed: int) -> Row:
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
        if mode.num_draft_tokens is not None:
            fields["num_draft_tokens"] = mode.num_draft_tokens
        client = self.clients[mode.front]
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(client.generate(token_ids={"token_ids": [1 + index, 2 + seed, 3]}, **fields) for index in range(streams))
        )
        seconds = time.perf_counter() - started
        found = [sample.finish.speculation for [sample] in answers]
        num_rounds = max(1, sum(each.num_rounds for each in found))
        return Row(
            "",
            mode.name,
            sum(len(sample.token_ids) for [sample] in answers) / seconds,
            sum(each.num_draft_tokens for each in found) / num_rounds,
            sum(each.num_accepted_tokens for each in found) / num_rounds,
        )

    async def rows(self, situation: str, modes: Sequence[Mode], streams: int, tokens: int, repeats: int) -> list[Row]:
        """Every mode in turn, ``repeats`` times, after a short run that nobody counts."""
        runs: dict[str, list[Row]] = {mode.name: [] for mode in modes}
        for mode in modes:
            await self.run(mode, streams, max(16, tokens // 4), 0)
        for repeat in range(repeats):
            for mode in modes:
                runs[mode.name].append(await self.run(mode, streams, tokens, repeat))
        return [_median(situation, of_mode) for of_mode in runs.values()]


def _median(situation: str, runs: Sequence[Row]) -> Row:
    def median(name: str) -> float:
        return float(statistics.median(getattr(run, name) for run in runs))

    names = ("tokens_per_s", "draft_tokens_per_round", "accepted_per_round")
    return Row(situation, runs[0].mode, *(median(name) for name in names))


async def _measure(
    console: Console,
    pair: PairName,
    table: TablePair,
    num_ahead_tokens: int,
    tokens: int,
    repeats: int,
) -> list[Row]:
    rows: list[Row] = []
    with console.status("Starting the services ...") as status:
        async with _lab(pair, table, num_ahead_tokens) as lab:
            for round_trip_ms in _ROUND_TRIPS_MS:
                status.update(f"The draft {round_trip_ms:g} ms away ...")
                lab.proxy.set(latency_s=round_trip_ms / 2e3)
                rows += await lab.rows(_situation(round_trip_ms), _MODES, 1, tokens, repeats)
            lab.proxy.set(latency_s=0.0)
            status.update(f"{_STREAMS} streams ...")
            some = [_ALONE, _AHEAD]
            rows += await lab.rows(f"{_STREAMS} streams", some, _STREAMS, max(16, tokens // 4), repeats)
            status.update("A draft that guesses at random ...")
            strange = [_ALONE, Mode(_AHEAD.name, "strange", None)]
            rows += await lab.rows("random", strange, 1, tokens, repeats)
            status.update("A draft that is gone ...")
            lab.proxy.refuse = True
            lab.proxy.reset()
            rows += await lab.rows("gone", some, 1, tokens, repeats)
    return rows


@asynccontextmanager
async def _lab(pair: PairName, table: TablePair, num_ahead_tokens: int) -> AsyncIterator[_Lab]:
    with tempfile.TemporaryDirectory(prefix="specdec-distance-") as directory:
        roles = _table_pair(table) if pair is PairName.table else _damped_pair(Path(directory))
        async with AsyncExitStack() as stack:
            ports: Iterator[int] = iter(free_ports(6))

            async def start(module: str, *arguments: str) -> Service:
                each = service(module, next(ports), [*arguments, "--log-level=WARNING"])
                return await stack.enter_async_context(each)

            target, draft, stranger = [await start(module, *arguments) for module, arguments in roles]
            for each in (target, draft, stranger):
                await healthy(each)
            proxy = await stack.enter_async_context(FaultProxy(int(draft.address.rpartition(":")[2])))
            near, strange = f"127.0.0.1:{proxy.port}", stranger.address
            clients = {}
            for name, address, ahead in (
                ("near", near, 0),
                ("ahead", near, num_ahead_tokens),
                ("strange", strange, num_ahead_tokens),
            ):
                flags = [f"--target={target.address}", f"--draft={address}", f"--num-ahead-tokens={ahead}"]
                front = await start("orchestrator", *flags)
                await healthy(front)
                await paired(front)
                clients[name] = await stack.enter_async_context(Client(front.address))
                _pin(front, 1)
            if pair is PairName.damped:
                _pin(target, 0)
                _pin(draft, 1)
                _pin(stranger, 1)
            yield _Lab(clients, proxy)


_Roles = list[tuple[str, list[str]]]
"""Of target, draft and a draft that guesses at random: the module and its flags."""


def _table_pair(table: TablePair) -> _Roles:
    step, guesses = f"--pass-ms={table.step_ms}", f"--acceptance={table.acceptance}"
    return [
        ("bench.table_service target", [f"--pass-ms={table.pass_ms}", guesses]),
        ("bench.table_service draft", [step, guesses]),
        ("bench.table_service draft", [step, "--acceptance=0"]),
    ]


def _damped_pair(directory: Path) -> _Roles:
    made = damped_pair(directory)
    flags = ["--threads=1", "--kv-slots=16384"]
    # The same shape from another seed: nothing in common.
    stranger = damped_pair(directory, Shape(seed=1))
    models = (("target_service", made.target), ("draft_service", made.draft), ("draft_service", stranger.draft))
    return [(module, [f"--model={path}", *flags]) for module, path in models]


def _pin(each: Service, core: int) -> None:
    """All its threads on one core, if there are two. A pair that is asleep most of the time needs none."""
    if (os.cpu_count() or 1) > 1:
        for thread in Path(f"/proc/{each.process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


if __name__ == "__main__":
    typer.run(main)

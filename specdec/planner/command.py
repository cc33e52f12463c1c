"""``specdec plan``: flags, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specdec.planner.pass_time import PassTime
from specdec.planner.scenario import Pair, Paths
from specdec.planner.sizing import Demand, Size, Sizing
from specdec.speculation.acceptance import PRIOR

_STREAMS = 16
_ROOFLINE = "1:20,128:21,256:28,512:51,1024:101"
"""A 70B model in 8 bits on one GPU with 4 TB/s: limited by reading weights, above 206 rows by compute. Not measured."""


def plan(
    targets: Annotated[list[int] | None, typer.Option(min=1, help="number of targets; may be repeated")] = None,
    drafts: Annotated[float | None, typer.Option(min=0.0, help="drafts per target; default: as few as suffice")] = None,
    rate: Annotated[float | None, typer.Option(min=0.0, help="requests per second and target (Poisson)")] = None,
    streams: Annotated[
        int | None, typer.Option(min=1, help=f"concurrent requests per target, without --rate; default: {_STREAMS}")
    ] = None,
    target_pass: Annotated[
        str, typer.Option(help="time of a target pass in ms: MS, MS+MS per row, or ROWS:MS,ROWS:MS,...")
    ] = _ROOFLINE,
    draft_pass: Annotated[str, typer.Option(help="time of a draft step, likewise; a row is a sequence")] = "2+0.003",
    acceptance: Annotated[float, typer.Option(help="acceptance rate of a draft token")] = 0.7,
    runner_up: Annotated[float, typer.Option(help="how often a correction is the draft's second guess")] = PRIOR[1],
    round_trip_ms: Annotated[float, typer.Option(help="network round trip between orchestrator and draft")] = 1.0,
    overhead_ms: Annotated[float, typer.Option(help="RPC overhead of an exchange with either service")] = 0.5,
    work_ms: Annotated[float, typer.Option(help="CPU time of the orchestrator per answer it receives")] = 0.1,
    measured: Annotated[
        str | None, typer.Option(help="JSON file of specdec bench rounds, replaces --overhead-ms and --work-ms")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="mean prompt length in tokens")] = 512,
    output: Annotated[int, typer.Option(min=2, help="mean output length in tokens")] = 256,
    spread: Annotated[float, typer.Option(help="lengths are uniform within this share of their mean")] = 0.5,
    max_live: Annotated[int, typer.Option(min=1, help="live sequences per target; further requests wait")] = 256,
    num_ahead_tokens: Annotated[int, typer.Option(min=0, help="nodes that a draft grows ahead; 0: none")] = 60,
    cell: Annotated[int, typer.Option(min=1, help="more targets are simulated as cells of this many")] = 4,
    seed: Annotated[int, typer.Option(help="seed of the simulation")] = 0,
    json_file: Annotated[str | None, typer.Option("--json", help="file to write all figures to")] = None,
) -> None:
    """Simulate deployments: how much to draft, how many drafts, the speed, and the sustainable rate.

    Each target has one orchestrator beside it.
    """
    if rate is not None and streams is not None:
        raise typer.BadParameter("name either --rate or --streams")
    try:
        paths = _paths(round_trip_ms, overhead_ms, work_ms, measured)
        demand = Demand(
            Pair(PassTime.parse(target_pass), PassTime.parse(draft_pass), acceptance, runner_up),
            paths,
            prompt,
            output,
            spread,
            rate,
            None if rate is not None else streams or _STREAMS,
            max_live,
            num_ahead_tokens,
            drafts,
            seed,
        )
        console = Console()
        with console.status("Simulating ...") as status:
            sizing = Sizing(demand, cell, status.update)
            sizes = [sizing.size(count) for count in targets or [1]]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if len(sizes) == 1:
        console.print(_tried_table(sizes[0]))
    console.print(_table(sizes))
    console.print(_explained(sizes, cell), highlight=False)
    if json_file:
        Path(json_file).write_text(json.dumps([_as_dict(size) for size in sizes], indent=1) + "\n")


def _paths(round_trip_ms: float, overhead_ms: float, work_ms: float, measured: str | None) -> Paths:
    if measured:
        overhead_ms, work_ms = _of_rounds(measured)
    return Paths(round_trip_ms / 1e3, overhead_ms / 1e3, work_ms / 1e3)


def _of_rounds(file: str) -> tuple[float, float]:
    """(overhead_ms, work_ms) measured by ``specdec bench rounds``. A round has two exchanges and two answers."""
    try:
        rows = sorted(json.loads(Path(file).read_text())["rows"], key=lambda row: int(row["sequences"]))
        work_ms = float(rows[-1]["cpu_us_orchestrator"]) / 2e3
        return max(0.0, float(rows[0]["overhead_ms_p50"]) / 2 - work_ms), work_ms
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise typer.BadParameter(f"{file} is no output of specdec bench rounds --json: {error!r}") from error


def _drafting(size: Size) -> str:
    ahead = " ahead" if size.drafting.num_ahead_tokens else ""
    return f"{size.drafting.num_draft_tokens}{ahead}"


def _table(sizes: Sequence[Size]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("targets", "drafts", "K", "tokens/s", "x alone", "first token", "per token", "use", "breaks at"):
        table.add_column(column, justify="right")
    table.add_row("", "", "", "", "", "ms p50 p99", "ms p50 p99", "% T D", "req/s (alone)", style="dim")
    for size in sizes:
        found = size.outcome
        table.add_row(
            str(size.targets),
            str(size.drafts),
            _drafting(size),
            f"{found.tokens_per_s * size.scale:.0f}",
            f"{size.alone.request_s / found.request_s:.2f}",
            _pair_ms(found.first_token_s, 0),
            _pair_ms(found.per_token_s, 1),
            f"{found.target_use * 100:.0f} {found.draft_use * 100:.0f}",
            f"{size.breaks_at:.1f} ({size.alone_breaks_at:.1f})",
        )
    return table


def _tried_table(size: Size) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("K", "ahead", "tokens/s", "request", "ms per token", "tokens per round", "foreseen"):
        table.add_column(column, justify="right")
    for each in size.tried:
        found = each.outcome
        table.add_row(
            str(each.drafting.num_draft_tokens),
            "yes" if each.drafting.num_ahead_tokens else "",
            f"{found.tokens_per_s * size.scale:.0f}",
            f"{found.request_s:.2f} s",
            _pair_ms(found.per_token_s, 1),
            f"{found.tokens_per_round:.2f}",
            f"{found.foreseen:.0%}" if each.drafting.num_ahead_tokens else "",
        )
    return table


def _pair_ms(seconds: tuple[float, float], digits: int) -> str:
    return " ".join(f"{value * 1e3:.{digits}f}" for value in seconds)


def _explained(sizes: Sequence[Size], cell: int) -> str:
    text = (
        "A simulation. x alone: speed of a request relative to the target alone. Use: utilization of targets (T) and "
        "drafts (D).\nBreaks at: the request rate above which the queue grows, with this K (and without drafting)."
    )
    if any(size.scale > 1 for size in sizes):
        text += f" More than {cell} targets are simulated as so many cells of {cell} that share nothing."
    return text


def _as_dict(size: Size) -> dict[str, Any]:
    """The size for JSON. Outcomes are those of the simulated cell."""
    return asdict(size) | {"scale": size.scale}

"""``specdec plan``: flags, the table and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specdec.planner.deployment import Deployment, Drafting, Pair, Paths, Speed, Workload
from specdec.planner.pass_time import PassTime
from specdec.speculation.acceptance import PRIOR

_ROOFLINE = "1:20,128:21,256:28,512:51,1024:101"
"""A 70B model in 8 bits on one GPU with 4 TB/s: limited by reading weights, above 206 rows by compute. Not measured."""


def plan(
    targets: Annotated[int, typer.Option(min=1, help="number of targets")] = 1,
    drafts: Annotated[int | None, typer.Option(min=1, help="number of drafts; default: as few as suffice")] = None,
    requests: Annotated[int, typer.Option(min=1, help="concurrent requests per target")] = 16,
    target_pass: Annotated[
        str, typer.Option(help="time of a target pass in ms: MS, MS+MS per row, or ROWS:MS,ROWS:MS,...")
    ] = _ROOFLINE,
    draft_pass: Annotated[str, typer.Option(help="time of a draft step, likewise; a row is a sequence")] = "2+0.003",
    curve: Annotated[
        str | None, typer.Option(help="file of measured target passes, replaces --target-pass: lines of ROWS SECONDS")
    ] = None,
    draft_curve: Annotated[
        str | None, typer.Option(help="file of measured draft steps, likewise, replaces --draft-pass")
    ] = None,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="acceptance rate of a draft token")] = 0.7,
    runner_up: Annotated[
        float, typer.Option(min=0, max=1, help="how often a correction is the draft's second guess")
    ] = PRIOR[1],
    round_trip_ms: Annotated[float, typer.Option(min=0, help="round trip between orchestrator and draft")] = 1.0,
    overhead_ms: Annotated[float, typer.Option(min=0, help="RPC overhead of an exchange with either service")] = 0.5,
    work_ms: Annotated[float, typer.Option(min=0, help="CPU time of the orchestrator per answer it receives")] = 0.1,
    measured: Annotated[
        str | None, typer.Option(help="JSON file of specdec bench rounds, replaces --overhead-ms and --work-ms")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="mean prompt length in tokens")] = 512,
    output: Annotated[int, typer.Option(min=2, help="mean output length in tokens")] = 256,
    json_file: Annotated[str | None, typer.Option("--json", help="file to write all figures to")] = None,
) -> None:
    """Predict a deployment: how much to draft, how many drafts, the speed, and the load of each service.

    Each target has one orchestrator next to it.
    """
    try:
        target = PassTime.read(curve) if curve else PassTime.parse(target_pass)
        draft = PassTime.read(draft_curve) if draft_curve else PassTime.parse(draft_pass)
        paths = Paths(round_trip_ms / 1e3, overhead_ms / 1e3, work_ms / 1e3)
        deployment = Deployment(
            Pair(target, draft, acceptance, runner_up),
            measured_paths(measured, paths) if measured else paths,
            Workload(requests, prompt, output),
            targets=targets,
            drafts=drafts or 1,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if drafts is None:
        deployment = deployment.with_fewest_drafts()
    speeds, best = deployment.speeds(), deployment.best()
    console = Console(highlight=False)
    console.print(_table(speeds, best))
    console.print(_summary(deployment, speeds, best))
    if json_file:
        rows = [asdict(drafting) | asdict(speed) for drafting, speed in speeds.items()]
        result = {"targets": targets, "drafts": deployment.drafts, "best": asdict(best), "rows": rows}
        Path(json_file).write_text(json.dumps(result, indent=1) + "\n")


def measured_paths(file: str, paths: Paths) -> Paths:
    """``paths`` with the costs that ``specdec bench rounds`` measured. A round has two exchanges and two answers.
    Raises ValueError."""
    try:
        rows = sorted(json.loads(Path(file).read_text())["rows"], key=lambda row: int(row["sequences"]))
        work_s = float(rows[-1]["cpu_us_orchestrator"]) / 2e6
        overhead_s = max(0.0, float(rows[0]["overhead_ms_p50"]) / 2e3 - work_s)
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"{file} is no output of specdec bench rounds --json: {error!r}") from error
    return replace(paths, overhead_s=overhead_s, work_s=work_s)


def _table(speeds: Mapping[Drafting, Speed], best: Drafting) -> Table:
    """A line for each K: where rounds wait for the draft, and where it grows ahead. The best setting is bold."""
    alone = speeds[Drafting()]
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for column in ("K", "tokens/s", "x alone", "ms/token", "use %", "ahead: tokens/s", "x alone", "ms/token", "use %"):
        table.add_column(column, justify="right")
    for number in sorted({drafting.num_draft_tokens for drafting in speeds}):
        cells = [str(number)]
        for ahead in (False, True):
            drafting = Drafting(number, ahead)
            if speed := speeds.get(drafting):
                style = "bold" if drafting == best else "default"
                cells += [f"[{style}]{cell}[/]" for cell in _cells(speed, alone)]
        table.add_row(*cells)
    return table


def _cells(speed: Speed, alone: Speed) -> tuple[str, str, str, str]:
    return (
        f"{speed.tokens_per_s:.0f}",
        f"{speed.tokens_per_s / alone.tokens_per_s:.2f}",
        f"{speed.ms_per_token:.1f}",
        f"{speed.target_load:.0%} {speed.draft_load:.0%}".replace("%", ""),
    )


def _summary(deployment: Deployment, speeds: Mapping[Drafting, Speed], best: Drafting) -> str:
    speed, alone = speeds[best], speeds[Drafting()]
    drafting = f"K = {best.num_draft_tokens}{', growing ahead' if best.ahead else ''}" if best.num_draft_tokens else ""
    return (
        f"Best: {drafting or 'the target alone'}. Targets: {deployment.targets}, drafts: {deployment.drafts}. "
        f"{speed.requests_per_s:.1f} requests/s (alone {alone.requests_per_s:.1f}), "
        f"each takes {speed.request_s:.2f} s (alone {alone.request_s:.2f}).\n"
        "A prediction. x alone: relative to the target alone. Use: load of targets and of drafts."
    )

"""The demo of the bundled pair: the same request with and without speculation, compared token by token."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.cli.display import MarkedText
from specdec.cli.processes import deployment
from specdec.client import Client, Sample

MODELS = Path(__file__).resolve().parents[2] / "models" / "demo"
PROMPT = '''\
class Stack:
    """A simple stack.

    >>> s = Stack()
    """

    def __init__(self, items=()):
        self.items ='''


@dataclass(frozen=True, slots=True)
class _Timed:
    sample: Sample
    tokens_per_s: float  # after the first token


async def run(console: Console, max_tokens: int, num_draft_tokens: int, temperature: float, seed: int) -> bool:
    """Run the demo. Returns whether both outputs are token-identical. Raises StartError or SpecdecError."""
    target, draft = str(MODELS / "target"), str(MODELS / "draft")
    async with AsyncExitStack() as stack:
        with console.status("Starting target, draft and orchestrator as three processes ..."):
            services = await stack.enter_async_context(
                deployment(target, draft, arguments=["--threads=1"], tell=console.print)
            )
        for service in services:
            console.print(f"  {service.name:<15} {service.address}  healthy", highlight=False)
        client = await stack.enter_async_context(Client(services[-1].address))
        request: dict[str, Any] = {"text": PROMPT, "temperature": temperature, "seed": seed}
        # A warm-up of both modes.
        for count in (num_draft_tokens, 0):
            await client.generate(**request, max_tokens=8, num_draft_tokens=count)

        request["max_tokens"] = max_tokens
        how = "greedy" if temperature == 0 else f"temperature {temperature}, seed {seed}"
        console.print(f"  {max_tokens} tokens, {how}, {num_draft_tokens} draft tokens per round", highlight=False)
        console.rule("with speculation")
        drafted = await _stream(console, client, request, num_draft_tokens)
        console.rule("target alone")
        alone = await _stream(console, client, request, 0)
        console.rule()
        console.print(MarkedText(console).legend)
    identical = drafted.sample.token_ids == alone.sample.token_ids
    _report(console, drafted, alone, identical)
    return identical


async def _stream(console: Console, client: Client, request: dict[str, Any], num_draft_tokens: int) -> _Timed:
    console.print(PROMPT, end="", style="dim", highlight=False, markup=False)
    sample, shown = Sample(), MarkedText(console)
    first = last = 0.0
    num_first = 0
    async for response in client.stream(**request, num_draft_tokens=num_draft_tokens):
        if not response.HasField("chunk"):
            continue
        sample.add(response.chunk)
        last = time.perf_counter()
        if not first:
            first, num_first = last, len(sample.token_ids)
        shown.show(sample)
    shown.end()
    return _Timed(sample, (len(sample.token_ids) - num_first) / max(last - first, 1e-9))


def _report(console: Console, drafted: _Timed, alone: _Timed, identical: bool) -> None:
    speculation = drafted.sample.finish.speculation
    acceptance = speculation.num_accepted_tokens / max(speculation.num_draft_tokens, 1)
    mean_length = 1 + speculation.num_accepted_tokens / max(speculation.num_drafts, 1)
    table = Table(show_header=True, header_style="bold", box=None)
    for column in ("", "tokens", "tokens/s", "passes of the target"):
        table.add_column(column, justify="left" if not column else "right")
    for name, timed in (("with speculation", drafted), ("target alone", alone)):
        rounds = timed.sample.finish.speculation.num_rounds
        table.add_row(name, str(len(timed.sample.token_ids)), f"{timed.tokens_per_s:.1f}", str(rounds))
    console.print(table)
    # A text with only one chunk has no measurable speed.
    measured = drafted.tokens_per_s and alone.tokens_per_s
    speed = f"{drafted.tokens_per_s / alone.tokens_per_s:.2f} x target alone" if measured else "not measured: too short"
    console.print(
        f"acceptance rate {acceptance:.2f}   mean accepted length {mean_length:.2f}   speed {speed}", highlight=False
    )
    if measured and drafted.tokens_per_s < alone.tokens_per_s:
        pass_ms = 1e3 / alone.tokens_per_s
        console.print(
            f"This demo fixes the number of draft tokens. A pass of its small target ({pass_ms:.0f} ms) takes less "
            "time than a round trip to the draft. By default the orchestrator drafts only where it pays.",
            highlight=False,
        )
    if identical:
        console.print("The two outputs are token-identical.", style="bold")
    else:
        console.print("The two outputs DIFFER.", style="bold red")

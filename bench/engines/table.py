"""The speeds as a table, and the ratios that answer a question. Does not know how anything was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from bench.engines.turns import Row

RATIOS = {
    "split": ("vllm services, alone", "vLLM generate"),
    "torch_over_vllm": ("torch services, alone", "vLLM generate"),
    "vllm_draft_over_draft_model": ("vllm services, draft", "vLLM draft_model"),
    "torch_draft_over_draft_model": ("torch services, draft", "vLLM draft_model"),
    "vllm_draft_over_alone": ("vllm services, draft", "vllm services, alone"),
    "vllm_adaptive_over_alone": ("vllm services, adaptive", "vllm services, alone"),
    "torch_adaptive_over_alone": ("torch services, adaptive", "torch services, alone"),
}
"""By name, of which contender over which."""

LEGEND = (
    "over vLLM: speed over vLLM's own generate, the median over the turns; drafted, accepted: draft tokens a round and"
    " their accepted share; lookup: tokens a round from prompt lookup; same: outputs equal to vLLM generate's"
)


def speeds(rows: Sequence[Row]) -> Table:
    """A line per contender, of one number of requests at a time."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for column in ("", "tokens/s", "over vLLM", "drafted", "accepted", "lookup", "same"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    streams = rows[0].streams
    table.add_row("1 request" if streams == 1 else f"{streams} requests at a time", style="italic")
    for row in rows:
        figures = [row.figure(name) for name in ("mean_draft_tokens", "acceptance", "mean_lookup_tokens")]
        table.add_row(
            f"  {row.name}",
            f"{row.tokens_per_s:.1f}",
            f"{row.over(rows[0]):.2f}",
            *(f"{figure:.2f}" if figure else "" for figure in figures),
            f"{row.same}/{row.compared}",
        )
    return table


def ratios(rows: Sequence[Row]) -> Mapping[str, float]:
    """By name and number of requests."""
    by_name = {(row.name, row.streams): row for row in rows}
    return {
        f"{name}_{streams}": round(by_name[one, streams].over(by_name[other, streams]), 3)
        for streams in dict.fromkeys(row.streams for row in rows)
        for name, (one, other) in RATIOS.items()
    }

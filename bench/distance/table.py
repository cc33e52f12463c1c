"""The result as a terminal shows it. Knows columns and words; refuses to know how anything was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from bench.distance.formula import Prediction
from bench.distance.modes import AHEAD, ALONE
from bench.distance.row import Row

LEGEND = (
    "drafted, accepted: tokens per round. hits: verdicts that were foreseen, after everything was accepted and after a"
    " correction. on time: drafts that nobody waited for. unused: nodes per round that came and were never verified."
    " ms per round: waiting for the draft, at the target in its queue, in the pass and in sampling, and the rest."
)


def sections(rows: Sequence[Row]) -> Iterator[tuple[str, float, Sequence[Row]]]:
    """Pair, temperature and their rows."""
    for pair, temperature in dict.fromkeys((row.pair, row.temperature) for row in rows):
        yield pair, temperature, [row for row in rows if (row.pair, row.temperature) == (pair, temperature)]


def results(rows: Sequence[Row], title: str) -> Table:
    """A block per situation, a line per mode."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
    words = ("draft", "mode")
    numbers = ("tokens/s", "x alone", "drafted", "accepted", "hits: bonus", "corr.", "on time", "unused")
    times = ("ms: draft", "queue", "pass", "sample", "rest")
    for column in (*words, *numbers, *times):
        table.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    alone = {row.situation: row.tokens_per_s for row in rows if row.mode == ALONE.name}
    before = ""
    for row in rows:
        spent = row.round_ms
        speculates = row.on_time is not None
        table.add_row(
            row.situation if row.situation != before else "",
            row.mode,
            f"{row.tokens_per_s:.1f}",
            f"{row.tokens_per_s / alone[row.situation]:.2f}",
            f"{row.draft_tokens_per_round:.1f}",
            f"{row.accepted_per_round:.1f}",
            _share(row.outcomes.bonus_hits),
            _share(row.outcomes.correction_hits),
            _share(row.on_time),
            f"{row.unused_nodes_per_round:.1f}" if speculates else "",
            f"{spent.draft_wait:.1f}" if speculates else "",
            *(f"{ms:.1f}" for ms in (spent.target_queue, spent.target_pass, spent.target_sample, spent.rest)),
        )
        before = row.situation
    return table


def hits_by_depth(rows: Sequence[Row], title: str) -> Table:
    """What growing ahead foresaw: hits of verdicts, by the depth of the correction."""
    rows = [row for row in rows if row.mode == AHEAD.name and row.outcomes.hits is not None]
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
    depths = max((len(row.outcomes.num_corrections) for row in rows), default=0)
    columns = ("draft", "all", "bonus", *(f"depth {depth}" for depth in range(depths)))
    for column in columns:
        table.add_column(column, justify="left" if column == "draft" else "right", no_wrap=True)
    for row in rows:
        found = row.outcomes
        by_depth = zip(found.num_corrections_foreseen, found.num_corrections, strict=True)
        table.add_row(
            row.situation,
            _share(found.hits),
            f"{found.num_bonuses_foreseen}/{found.num_bonuses}",
            *(f"{foreseen}/{whole}" for foreseen, whole in by_depth),
        )
    return table


def formula(predictions: Sequence[Prediction]) -> Table:
    """What was fitted, and what it says of the distance that it was not fitted on."""
    table = Table(
        title="Formula: ms per token = (s + w r) / E, fitted on the other distances",
        title_justify="left",
        box=None,
        header_style="bold",
        padding=(0, 1, 0, 0),
    )
    words = ("pair", "T", "mode")
    for column in (*words, "s", "w", "E", "r", "predicted ms", "measured", "error"):
        table.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    before = ("", "")
    for each in predictions:
        section = (each.pair, f"{each.temperature:g}")
        table.add_row(
            *(section if section != before else ("", "")),
            each.mode,
            f"{each.formula.round_ms:.1f}",
            f"{each.formula.waiting:.2f}",
            f"{each.formula.tokens_per_round:.2f}",
            f"{each.round_trip_ms:g}",
            f"{each.predicted_ms_per_token:.1f}",
            f"{each.measured_ms_per_token:.1f}",
            f"{each.error:+.1%}",
        )
        before = section
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

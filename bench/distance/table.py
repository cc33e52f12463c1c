"""The result as tables for a terminal. Knows columns and labels; does not know how anything was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from bench.distance.formula import PREDICTED_MS, Prediction
from bench.distance.modes import AHEAD, ALONE
from bench.distance.row import Row

LEGEND = (
    "tokens/s: the median of the runs. x alone: the median of the ratios of all turns. drafted, accepted: tokens per"
    " round, including prompt lookup in the modes adaptive and ahead. hit rate: the share of verdicts after which the"
    " next tree was already there. on time: the share of drafts that arrived without a wait. unused: nodes per round"
    " that arrived and were never verified. Parts of a round: waiting for the draft; queue, pass and sampling, as"
    " reported by the target; the rest."
)


def sections(rows: Sequence[Row]) -> Iterator[tuple[str, float, Sequence[Row]]]:
    """(pair, temperature, their rows)."""
    for pair, temperature in dict.fromkeys((row.pair, row.temperature) for row in rows):
        yield pair, temperature, [row for row in rows if (row.pair, row.temperature) == (pair, temperature)]


def speeds(rows: Sequence[Row], title: str) -> Table:
    """The speeds: a block per situation, a line per mode."""
    table = _table(title, "tokens/s", "x alone", "drafted", "accepted", "hit rate", "on time", "unused")
    for situation, block in _blocks(rows):
        table.add_row(situation, style="italic")
        alone = next((row for row in block if row.mode == ALONE.name), None)
        for row in block:
            speculates = row.on_time is not None
            table.add_row(
                f"  {row.mode}",
                f"{row.tokens_per_s:.1f}",
                f"{row.over(alone):.2f}" if alone else "",
                f"{row.draft_tokens_per_round:.1f}" if speculates else "",
                f"{row.accepted_per_round:.1f}" if speculates else "",
                _share(row.outcomes.hits) if row.mode == AHEAD.name else "",
                _share(row.on_time),
                f"{row.unused_nodes_per_round:.1f}" if speculates else "",
            )
    return table


def times(rows: Sequence[Row], title: str) -> Table:
    """The parts of a round's time in milliseconds: a block per situation, a line per mode."""
    table = _table(title, "draft", "queue", "pass", "sampling", "rest", "a round")
    for situation, block in _blocks(rows):
        table.add_row(situation, style="italic")
        for row in block:
            spent = row.round_ms
            parts = (spent.draft_wait, spent.target_queue, spent.target_pass, spent.target_sample, spent.rest)
            table.add_row(f"  {row.mode}", *(f"{ms:.1f}" for ms in (*parts, sum(parts))))
    return table


def hits(rows: Sequence[Row], title: str) -> Table:
    """Hit rates of the mode ahead: all verdicts, bonuses, corrections, and hits / verdicts by correction depth."""
    rows = [row for row in rows if row.mode == AHEAD.name and row.outcomes.hits is not None]
    depths = max((len(row.outcomes.num_corrections) for row in rows), default=0)
    table = _table(title, "all", "bonus", "corr.", *(f"at {depth}" for depth in range(depths)))
    for row in rows:
        found = row.outcomes
        by_depth = zip(found.num_correction_hits, found.num_corrections, strict=True)
        table.add_row(
            row.situation,
            _share(found.hits),
            _share(found.bonus_hits),
            _share(found.correction_hits),
            *(f"{foreseen}/{whole}" for foreseen, whole in by_depth),
        )
    return table


def formula(predictions: Sequence[Prediction]) -> Table:
    """The fitted parameters, and the predicted and the measured time at the distance that was not fitted."""
    title = f"Time per token by the formula, fitted on the other distances, at {PREDICTED_MS:g} ms"
    table = _table(title, "s", "h", "E", "predicted", "measured", "error")
    before = ""
    for each in predictions:
        section = f"{each.pair}, T = {each.temperature:g}"
        if section != before:
            table.add_row(section, style="italic")
            before = section
        table.add_row(
            f"  {each.mode}",
            f"{each.formula.round_ms:.1f} ms",
            _share(each.formula.hit_rate) if each.mode == AHEAD.name else "",
            f"{each.formula.tokens_per_round:.2f}",
            f"{each.predicted_ms_per_token:.1f} ms",
            f"{each.measured_ms_per_token:.1f} ms",
            f"{each.error:+.1%}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _blocks(rows: Sequence[Row]) -> Iterator[tuple[str, Sequence[Row]]]:
    for situation in dict.fromkeys(row.situation for row in rows):
        yield situation, [row for row in rows if row.situation == situation]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

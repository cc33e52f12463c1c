"""The result as a terminal shows it. Knows columns and words; refuses to know how anything was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from bench.distance.formula import PREDICTED_MS, Prediction
from bench.distance.modes import AHEAD, ALONE
from bench.distance.row import Row

LEGEND = (
    "tokens/s: the median of the runs. x alone: the median of what each turn says. drafted, accepted: tokens per round,"
    " with those that adaptive and ahead guess from the text itself. foreseen: verdicts after which the next tree was"
    " there. on time: drafts that nobody waited for. unused: nodes per round that came and were never verified. Of a"
    " round's time: waiting for the draft; at the target in its queue, the pass and sampling, as the target says; the"
    " rest."
)


def sections(rows: Sequence[Row]) -> Iterator[tuple[str, float, Sequence[Row]]]:
    """Pair, temperature and their rows."""
    for pair, temperature in dict.fromkeys((row.pair, row.temperature) for row in rows):
        yield pair, temperature, [row for row in rows if (row.pair, row.temperature) == (pair, temperature)]


def speeds(rows: Sequence[Row], title: str) -> Table:
    """A block per situation, a line per mode."""
    table = _table(title, "tokens/s", "x alone", "drafted", "accepted", "foreseen", "on time", "unused")
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
    """The same for what a round's milliseconds are spent on."""
    table = _table(title, "draft", "queue", "pass", "sampling", "rest", "a round")
    for situation, block in _blocks(rows):
        table.add_row(situation, style="italic")
        for row in block:
            spent = row.round_ms
            parts = (spent.draft_wait, spent.target_queue, spent.target_pass, spent.target_sample, spent.rest)
            table.add_row(f"  {row.mode}", *(f"{ms:.1f}" for ms in (*parts, sum(parts))))
    return table


def hits(rows: Sequence[Row], title: str) -> Table:
    """Verdicts that were foreseen of how many, after everything was accepted, and by the depth of the correction."""
    rows = [row for row in rows if row.mode == AHEAD.name and row.outcomes.hits is not None]
    depths = max((len(row.outcomes.num_corrections) for row in rows), default=0)
    table = _table(title, "all", "bonus", "corr.", *(f"at {depth}" for depth in range(depths)))
    for row in rows:
        found = row.outcomes
        by_depth = zip(found.num_corrections_foreseen, found.num_corrections, strict=True)
        table.add_row(
            row.situation,
            _share(found.hits),
            _share(found.bonus_hits),
            _share(found.correction_hits),
            *(f"{foreseen}/{whole}" for foreseen, whole in by_depth),
        )
    return table


def formula(predictions: Sequence[Prediction]) -> Table:
    """What was fitted, and what it says of the distance that it was not fitted on."""
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

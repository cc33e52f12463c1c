"""The result as tables for a terminal. Knows columns and labels; does not know how anything was measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench.peers.contender import ADAPTIVE
from bench.peers.measuring import Row


def contenders(rows: Sequence[Row]) -> Table:
    """A block per number of concurrent requests, a line per contender, the fastest of a block in bold."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for column in ("", "tokens/s", "x peer", "threads", "K (mean)", "accepted", "same"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for streams in dict.fromkeys(row.streams for row in rows):
        block = [row for row in rows if row.streams == streams]
        fastest = max(row.tokens_per_s for row in block)
        peer = best_peer(block)
        table.add_row("1 request" if streams == 1 else f"{streams} requests at a time", style="italic")
        for index, row in enumerate(block):
            acceptance = row.figure("acceptance")
            table.add_row(
                f"  {row.kind}",
                f"{row.tokens_per_s:.1f}",
                f"{row.over(peer):.2f}" if peer and row.kind.is_ours else "",
                ("&" if row.settings.ahead else "+").join(str(count) for count in row.settings.threads),
                _draft_tokens(row),
                f"{acceptance:.2f}" if acceptance else "",
                f"{row.identical}/{row.compared}" if row.compared else "",
                style="bold" if row.tokens_per_s == fastest else "",
                end_section=index == len(block) - 1,
            )
    return table


LEGEND = (
    "x peer: speed over the fastest transformers contender, turn by turn; threads: of the process, or of target + draft"
    " (target & draft if the draft grows ahead); K: requested draft tokens (auto: adaptive) and their mean per round;"
    " accepted: the accepted share of them; same: outputs equal to generate's (bfloat16 has near ties)"
)


def lookups_in_words(rows: Sequence[Row]) -> str:
    """The prompt-lookup tokens, which the columns K and accepted leave out; empty without any."""
    found = [
        f"{row.kind}, {row.streams} at a time {guessed:.1f}"
        for row in rows
        if (guessed := row.figure("mean_lookup_tokens"))
    ]
    return f"Tokens per round from prompt lookup instead: {'; '.join(found)}" if found else ""


def best_peer(block: Sequence[Row]) -> Row | None:
    """The fastest transformers contender of a block; None without any."""
    return max((row for row in block if not row.kind.is_ours), key=lambda row: row.tokens_per_s, default=None)


def _draft_tokens(row: Row) -> str:
    mean = row.figure("mean_draft_tokens")
    # "auto" is short enough for a terminal with 80 columns.
    asked_for = "auto" if row.settings.num_draft_tokens == ADAPTIVE else row.settings.draft_tokens
    return asked_for + ("" if mean is None or not row.settings.draft_tokens else f" ({mean:.1f})")

"""The methods of drafting by name: how each is served. Does not know what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ALONE = "target alone"
HEADS = ("head", "medusa", "redrafter")
"""Folders beside each other; of them EAGLE-3's is in the repository."""


class Method(NamedTuple):
    """What drafts beside the target (a head, or a name of --self-draft), what drafts as a service of its own, and how
    many tokens of past answers are searched."""

    beside: str = ""
    draft: str = ""
    history: int = 0


METHODS = {
    "lookup": Method(),
    "history": Method(history=100_000),
    "ngram": Method(draft="ngram"),
    "draft": Method(draft="draft"),
    "head": Method("head"),
    "medusa": Method("medusa"),
    "redrafter": Method("redrafter"),
    "head and draft": Method("head", "draft"),
    "recycling": Method("recycling"),
    "lookahead": Method("lookahead"),
    "all": Method("head", "draft", 100_000),
}
"""By name. Lookup is part of each."""


def chosen(names: Sequence[str], heads: Path) -> tuple[list[str], list[str]]:
    """Those that can be served, and those that have no head in the folder ``heads``. Raises ValueError for a name that
    is no method's."""
    if unknown := [name for name in names if name not in METHODS]:
        raise ValueError(f"there is no method {unknown[0]}: {', '.join(METHODS)}")
    missing = [each for each in HEADS if not (heads / each).is_dir()]
    served = [name for name in names if METHODS[name].beside not in missing]
    return served, [name for name in names if name not in served]


def beside_flag(beside: str, heads: Path) -> list[str]:
    """Of a target."""
    if not beside:
        return []
    return [f"--head={heads / beside}" if beside in HEADS else f"--self-draft={beside}"]

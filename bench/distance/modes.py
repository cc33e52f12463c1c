"""The compared modes: the target alone, a synchronous draft, and a draft that grows ahead of the verdict.

Knows the names, the request options and the orchestrator of each mode; does not know models and distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode. ``front`` names its orchestrator; ``num_draft_tokens`` None: adaptive."""

    name: str
    front: str
    num_draft_tokens: int | None


ALONE = Mode("alone", "near", 0)
ADAPTIVE = Mode("sync, adaptive", "near", None)
AHEAD = Mode("ahead", "ahead", None)
UNRELATED = Mode(AHEAD.name, "unrelated", None)
"""The mode ahead with a draft that has nothing in common with the target."""


def sync(num_draft_tokens: int) -> Mode:
    return Mode(f"sync, K = {num_draft_tokens}", "near", num_draft_tokens)


def modes(fixed: Sequence[int], is_short: bool) -> list[Mode]:
    """``is_short``: only the middle one of the ``fixed`` numbers of draft tokens, without the adaptive mode."""
    if is_short:
        return [ALONE, sync(fixed[len(fixed) // 2]), AHEAD]
    return [ALONE, *map(sync, fixed), ADAPTIVE, AHEAD]

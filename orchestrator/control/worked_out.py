"""What costs have worked out of their measurements. When there is news all of it is worked out anew, as somebody asks.
Knows nothing of how.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class WorkedOut:
    """Seconds; 0 and empty: not yet."""

    alone_s: float = 0.0
    beside_s: float = 0.0
    rounds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    unwaited: list[float] = field(default_factory=list)
    guessed: dict[int, list[float]] = field(default_factory=dict)  # by the draft tokens that others wait for
    among: dict[tuple[int, bool], float] = field(default_factory=dict)  # by the same, and whether these are waited for

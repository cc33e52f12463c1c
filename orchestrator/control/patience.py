"""How long a draft is worth waiting for. Pure arithmetic."""

from __future__ import annotations

_TIMES = 4.0
"""A draft is late when it takes so many times what it takes as a rule."""

_UNKNOWN_S = 1.0
_UNKNOWN_ROUNDS = 2.0
"""While that is not known; and so many rounds of the target alone, once these are. It takes two growths to know."""

_LEAST_S = 0.05
"""However quick it is as a rule: an event loop may be busy."""


def patience_s(draft_s: float | None, alone_s: float | None, most: int) -> float:
    """For a growth that takes ``draft_s`` as a rule: never longer than the target takes alone for as many tokens as
    could come of it, ``alone_s`` for each of ``most``. None: not known."""
    if alone_s is None:
        return _UNKNOWN_S
    if draft_s is None:
        return max(_LEAST_S, min(_UNKNOWN_S, _UNKNOWN_ROUNDS * alone_s))
    return max(_LEAST_S, min(_TIMES * draft_s, most * alone_s))

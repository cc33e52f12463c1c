"""How often guesses turn out right, of late.

Knows counts; refuses to know who guessed.
"""

from __future__ import annotations


class Acceptance:
    """Of tokens that were tried; ``memory`` is about how many of them are remembered.

    It begins as if ``trials`` had been tried, a share of ``prior`` of them rightly.
    """

    __slots__ = ("_memory", "_right", "_tried")

    def __init__(self, memory: int, prior: float = 0.0, trials: float = 0.0) -> None:
        self._memory = memory
        self._right, self._tried = prior * trials, trials

    def observe(self, right: int, tried: int) -> None:
        """Of ``tried`` tokens in a row ``right`` were accepted."""
        forget = 1 - tried / self._memory
        self._right = forget * self._right + right
        self._tried = forget * self._tried + tried

    def forget(self, trials: float) -> None:
        """What was learnt counts no more than ``trials`` from now on."""
        forget = min(1.0, trials / max(1.0, self._tried))
        self._right, self._tried = forget * self._right, forget * self._tried

    def share(self, prior: float = 0.0, trials: float = 0.0) -> float:
        """Of those tried, from 0 to 1, believed as much as ``trials`` more with a share of ``prior``. Needs a trial."""
        return (self._right + trials * prior) / (self._tried + trials)

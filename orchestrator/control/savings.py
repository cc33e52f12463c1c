"""What speculation may lose: what it gained before, and a little in any case. In rounds of the target alone.

Knows gains; refuses to know what was gained by whom. It begins with some rounds, which it may also owe, and saves up to
twice as many: a good draft that is far away loses four or five in a row now and then.
"""

from __future__ import annotations

_LOAN, _MOST = 4.0, 8.0

PROBING = 0.015
"""The share of the rounds without speculation that may be spent on looking whether it pays."""


class Savings:
    """Of all requests of this process; an account for each load, so that gains under one are not lost under another."""

    def __init__(self) -> None:
        self._rounds: dict[int, float] = {}
        self._load = 0

    @property
    def rounds(self) -> float:
        return self._rounds.get(self._load, _LOAN)

    @property
    def left(self) -> bool:
        """Whether anything may be lost at all."""
        return self.rounds > 0

    def book(self, gain: float) -> None:
        """So many rounds were gained; negative: lost."""
        self._rounds[self._load] = max(-_LOAN, min(self.rounds + gain, _MOST))

    def another_load(self, load: int) -> None:
        """See load_size."""
        self._load = load

    def cover(self, loss: float) -> bool:
        """Whether so many rounds may be lost: what is dearer than all that it began with may cost that."""
        return self.left and self.rounds >= min(_LOAN, loss)

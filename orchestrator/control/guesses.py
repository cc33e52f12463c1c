"""What of a sequence's prompt lookup is verified, and how much may come unasked for its sake.

Knows what rounds cost and how likely a guess is; refuses to know where guesses come from and why the draft is asked
for so much. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.control.costs import Costs
from orchestrator.control.promises import OFF, ON, promises
from orchestrator.control.prompt_lookup import MOST_GUESSED, PromptLookup
from orchestrator.rounds import NO_GUESS, Guess, Proposal, Rival
from orchestrator.sequence import Sequence
from specdec.core.rounds import OVERRUN, Verdict

_FIRST = 4
"""Tokens of a guess while it is not known what rows cost."""

_CHECK_EVERY = 128
"""Rounds with a guess after which one goes without, to see that the target alone is still as slow as it is taken
to be."""

_DOUBT = 0.5
"""A guess that is right as a whole less often than this will rather fail."""

_AGAIN = 4
"""Rounds after a guess in which the target is asked for each token, because copied text goes on after an edit."""
_DEAR = 1.25
"""To be asked for a token takes so many times what it does unasked, where it misses a pass of the others."""


class Guesses:
    """Of one sequence."""

    def __init__(self, costs: Costs, lookup: PromptLookup) -> None:
        self._costs = costs
        self._lookup = lookup
        self._num_rounds = 0
        self._num_worthwhile = 0  # rounds in a row that promise more with a guess than without
        self._granted_at = -_AGAIN  # the round that was granted a guess last
        self._cut = False  # for the lookup's sake nothing more may come unasked
        self._held = False  # and so this round had to be asked for
        self._drafting, self._awaited = False, 0
        self._judged: tuple[list[float], float] = [], 0.0  # rounds, and what they are compared with
        self._pays = False

    def grant(
        self, sequence: Sequence, drafting: bool, awaited: int, unasked: int, beaten: Callable[[float], Rival]
    ) -> tuple[Guess, int]:
        """What the lookup guesses for the round to come, as far as it is worth verifying, and how many tokens may come
        unasked after the round: none where a guess is there that is worth to be verified.

        All wait for ``awaited`` draft tokens. So many rounds, from this one on, come ``unasked``. ``beaten`` tells the
        best of what promises less than a guess does, which the guess then goes before.
        """
        self._num_rounds += 1
        self._drafting, self._awaited = drafting, awaited
        guess, most = self._grant(sequence, unasked, beaten)
        self._held = self._cut and not (drafting or unasked)
        self._cut = not (drafting or most)
        return guess, most

    def forgo(self) -> None:
        """The round to come is to show what the target takes alone."""
        self._num_rounds += 1
        self._held = self._cut = False

    def observe(self, proposal: Proposal, verdict: Verdict) -> None:
        """The outcome of a round, whoever proposed the tree."""
        if verdict.round and self._costs.alone_known:
            num_guessed = len(proposal.tree) if proposal.guessed is not None else 0
            gain = self._costs.probing
            if num_guessed or self._held:
                gain = self._costs.gain(self._rounds[num_guessed], len(verdict.accepted) + 1, self._alone_s)
            self._costs.lookup_savings.book(gain)

    def _grant(self, sequence: Sequence, unasked: int, beaten: Callable[[float], Rival]) -> tuple[Guess, int]:
        costs, most = self._costs, sequence.remaining - 1
        if not costs.lookup_savings.left or most <= 0 or not sequence.num_committed:
            return NO_GUESS, most
        if not costs.rows_known:
            # What rows cost is to be known, where no draft shows it.
            chances = self._lookup.look(sequence.ids)
            num_guessed, promise = min(_FIRST, most, len(chances)), 1.0
        elif not self._can_pay():
            return NO_GUESS, most
        else:
            chances = self._lookup.look(sequence.ids)[:most]
            num_guessed, promise = self._best(chances, min(unasked, OVERRUN))
        self._num_worthwhile = self._num_worthwhile + 1 if num_guessed else 0
        if not num_guessed or self._num_worthwhile % _CHECK_EVERY == 0:
            again = self._num_rounds - self._granted_at <= _AGAIN and self._rounds[0] < _DEAR * self._alone_s
            return NO_GUESS, 0 if again else most
        if unasked:
            return NO_GUESS, 0
        self._granted_at = self._num_rounds
        in_doubt = chances[num_guessed - 1] < _DOUBT
        return Guess(self._lookup.guess(num_guessed), beaten(promise), in_doubt), 0

    def _can_pay(self) -> bool:
        """Else rows cost so much that nothing would be gained if all were right. Costs work their rounds out anew where
        there is news, and give the same list until then."""
        rounds, alone_s = self._rounds, self._alone_s
        if rounds is not self._judged[0] or alone_s != self._judged[1]:
            self._judged = rounds, alone_s
            self._pays = max(self._promised([1.0] * MOST_GUESSED)) >= ON
        return self._pays

    def _best(self, chances: list[float], unasked: int) -> tuple[int, float]:
        """How many tokens of the guess promise the most, and what; 0: the target alone promises as much."""
        promised = self._promised(chances)
        promise, without = max(promised), self._alone_s / self._rounds[0]
        # Will it be there still when all has come that comes unasked? If not, a round is asked for in vain.
        alive = [1.0, *chances][unasked] if unasked <= len(chances) else 0.0
        hope = alive * promise + (1 - alive) * without
        return promised.index(promise) if hope >= (OFF if self._num_worthwhile else ON) else 0, promise

    def _promised(self, chances: list[float]) -> list[float]:
        return promises(chances, self._rounds, self._alone_s)

    @property
    def _rounds(self) -> list[float]:
        return self._costs.guessed(self._drafting, self._awaited)

    @property
    def _alone_s(self) -> float:
        return self._costs.alone_beside(self._drafting)

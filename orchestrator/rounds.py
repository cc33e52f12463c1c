"""What passes between the controller, which decides, and the speculation, which carries it out: a value each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from specdec.core.rounds import Budget
from specdec.core.tree import EMPTY_TREE, TokenTree


class Rival(IntEnum):
    """What else could be verified, the worst first: nothing (the draft gave none), a tree that is still to be waited
    for, a tree of the draft's that is there."""

    NOTHING = 0
    WAIT = 1
    TREE = 2


@dataclass(frozen=True, slots=True)
class Guess:
    """What the text's own past holds likely. It is verified instead of ``beats`` and of what is worse.

    ``in_doubt``: it will rather fail somewhere than not.
    """

    tree: TokenTree = EMPTY_TREE
    beats: Rival = Rival.NOTHING
    in_doubt: bool = False


NO_GUESS = Guess()


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Of the round to come.

    ``budget``: nodes of the draft that are worth waiting for, and as ``max_depth`` how many are worth verifying if more
    are there already; 0 and some: they may be grown, but nobody waits. ``rounds``: seconds with 0, 1, ... nodes that
    are there; of such a tree as many are verified as promise the most per second. Empty: max_depth of them, always.
    ``soon``: none is verified yet, as the verdict comes unasked. ``run_on``: after this round the target may make so
    many tokens unasked, and if it does so already, no more. ``early``: the round after it may be sent before its
    verdict.
    """

    budget: Budget
    run_on: int = 0
    guess: Guess = NO_GUESS
    soon: bool = False
    rounds: Sequence[float] = ()
    early: bool = False


Early = Callable[[], tuple[TokenTree, int]]
"""What the round after may verify: a tree below the last committed token, as that is before the verdict, and of what is
left of it then how many nodes, the first ones. Empty: nothing is there yet."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is verified, and how it came. ``guessed``: what the guess that it is was preferred to; None: it is none.

    ``foreseen``: whether something to verify was there when the draft was asked for more; None: it was not asked.
    ``was_there``: something of the draft's was there as soon as the verdict before. ``num_received``: nodes of the
    draft's that have come since the proposal before. ``waited_s``: for the draft; None: nobody waited. ``early``: of
    the round after, if that may be sent early.
    """

    tree: TokenTree = EMPTY_TREE
    guessed: Rival | None = None
    foreseen: bool | None = None
    was_there: bool = False
    num_received: int = 0
    waited_s: float | None = None
    early: Early | None = None

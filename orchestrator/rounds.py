"""The values between the controller and the speculation: the plan of a round, and the proposal made from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from specdec.core.rounds import Budget
from specdec.core.tree import EMPTY_TREE, TokenTree


class Rival(IntEnum):
    """The alternatives to a prompt-lookup proposal, the worst first: nothing (the draft gave no tree), a tree that the
    round has to wait for, a tree of the draft that has arrived."""

    NOTHING = 0
    WAIT = 1
    TREE = 2


@dataclass(frozen=True, slots=True)
class Guess:
    """A prompt-lookup proposal. It is verified instead of ``beats`` and of worse alternatives.

    ``in_doubt``: a rejection somewhere in it is more likely than none.
    """

    tree: TokenTree = EMPTY_TREE
    beats: Rival = Rival.NOTHING
    in_doubt: bool = False


NO_GUESS = Guess()


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The plan of the next round.

    ``budget.max_nodes``: draft tokens that the round waits for. ``budget.max_depth``: draft tokens that are verified if
    they have arrived; with max_nodes = 0 they may grow, but the round does not wait. ``rounds``: duration in seconds of
    a round with 0, 1, ... nodes; of an arrived tree the part with the most tokens per second is verified. Empty: always
    the likeliest max_depth nodes. ``soon``: nothing is verified yet, because the next verdict is autonomous.
    ``run_on``: autonomous verdicts allowed after this round, those in flight included. ``early``: the next round may be
    sent before the verdict on this one.
    """

    budget: Budget
    run_on: int = 0
    guess: Guess = NO_GUESS
    soon: bool = False
    rounds: Sequence[float] = ()
    early: bool = False


Early = Callable[[], tuple[TokenTree, int]]
"""Makes the next round before the verdict on this one: a tree below the present base, and how many nodes to verify of
what is left of it after the verdict (the first ones). An empty tree: none has arrived yet."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The tree to verify, and its origin.

    ``guessed``: the alternative that a prompt-lookup proposal replaced; None: the tree is the draft's. ``foreseen``:
    speculation hit, a tree had arrived when the draft was asked for more; None: it was not asked. ``was_there``: a tree
    of the draft was there at the last verdict. ``num_received``: draft nodes received since the last proposal.
    ``waited_s``: time spent waiting for the draft; None: no wait. ``early``: makes the next round, if it may be early.
    """

    tree: TokenTree = EMPTY_TREE
    guessed: Rival | None = None
    foreseen: bool | None = None
    was_there: bool = False
    num_received: int = 0
    waited_s: float | None = None
    early: Early | None = None

"""One request on its way: how much of it is left, where it is, and what the orchestrator knows of its tree.

A tree is counted, not held: the chain in flight and how far it is known to go on behind that.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specdec.planner.draft import Draft, Work
    from specdec.planner.orchestrator import Orchestrator
    from specdec.planner.target import Target


class Met(Enum):
    """Where the draft had the token that ends a verdict: on the chain in flight, as a runner-up beside it, or not."""

    NOWHERE = 0
    TAIL = 1
    BRANCH = 2


class Request:
    """Times in seconds of the simulation; -1: not yet."""

    __slots__ = (
        "advance",
        "arrived",
        "behind",
        "draft",
        "ended",
        "first",
        "flying",
        "left",
        "orchestrator",
        "output",
        "target",
        "unasked",
        "unfed",
        "unfed_draft",
        "work",
    )

    def __init__(self, arrived: float, prompt: int, output: int) -> None:
        self.arrived = arrived
        self.first = self.ended = -1.0
        self.output = self.left = output
        self.unfed = self.unfed_draft = prompt  # of the prompt, what the services have yet to take in
        self.unasked = 0  # tokens that the target may make by itself
        self.orchestrator: Orchestrator | None = None
        self.target: Target | None = None
        self.draft: Draft | None = None
        self.advance = 0  # number of the last one
        self.flying = 0  # nodes that are being verified
        self.behind = 0  # nodes of the same chain that were known when they were sent
        self.work: Work | None = None  # the draft's own


class Advance(NamedTuple):
    """What the orchestrator tells a draft after a verdict: ``accepted`` nodes and a token that was ``met`` are
    committed; ``wanted`` nodes are waited for, or ``flying`` are there already. ``number`` -1 closes, 0 opens."""

    request: Request
    number: int
    wanted: int = 0
    flying: int = 0
    accepted: int = 0
    met: Met = Met.NOWHERE

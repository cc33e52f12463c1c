"""One request on its way: how much of it is left, where it is, and what the orchestrator knows of its tree.

A tree is counted, not held: the chain in flight and how far it is known to go on behind that.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class Owner(Protocol):
    """The orchestrator of a request, as both services see it."""

    def verdicts(self, frame: Sequence[Request]) -> None: ...

    def growths(self, frame: Sequence[Work]) -> None: ...


class Target(Protocol):
    """The target of a request, as its orchestrator sees it. ``live``: sequences that it has."""

    live: int

    def receive(self, requests: Sequence[Request]) -> None: ...

    def close(self, request: Request) -> None: ...


class Draft(Protocol):
    """The draft of a request, as its orchestrator sees it."""

    live: int

    def receive(self, advances: Sequence[Advance]) -> None: ...

    def passes_ahead(self, work: Work, by: float) -> int: ...

    def below(self, work: Work, advance: Advance, passes: int) -> int: ...


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
        self.orchestrator: Owner | None = None
        self.target: Target | None = None
        self.draft: Draft | None = None
        self.advance = 0  # number of the last one
        self.flying = 0  # nodes that are being verified
        self.behind = 0  # nodes of the same chain that were known when they were sent
        self.work: Work | None = None  # the draft's own


class State(Enum):
    FEEDING = 0  # its prompt
    GROWING = 1
    AHEAD = 2
    IDLE = 3


class Work:
    """What the draft does for one advance."""

    __slots__ = ("ahead_from", "began", "behind", "done_at", "flying", "number", "request", "state", "wanted")

    def __init__(self, request: Request, number: int, wanted: int) -> None:
        self.request = request
        self.number = number
        self.wanted = wanted
        self.state = State.IDLE
        self.done_at = 0  # the step after which what is wanted is there
        self.flying = self.behind = 0
        self.began = -1.0  # when what was wanted was there
        self.ahead_from = 0  # passes ahead before that


class Advance(NamedTuple):
    """What the orchestrator tells a draft after a verdict: ``accepted`` nodes and a token that was ``met`` are
    committed; ``wanted`` nodes are waited for, or ``flying`` are there already. ``number`` -1 closes, 0 opens."""

    request: Request
    number: int
    wanted: int = 0
    flying: int = 0
    accepted: int = 0
    met: Met = Met.NOWHERE

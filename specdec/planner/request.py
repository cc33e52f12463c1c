"""A simulated request: its remaining tokens, its replicas, and its tree.

A tree is represented by two counts: the nodes in flight, and the known nodes of the same chain behind them.
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
    """The target of a request, as its orchestrator sees it. ``live`` is its number of sequences."""

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
    """Where the draft had the last token of a verdict: on the chain in flight, as a runner-up beside it, or nowhere."""

    NOWHERE = 0
    TAIL = 1
    BRANCH = 2


class Request:
    """A request. Times are seconds of simulated time; -1: not yet."""

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
        "run_on",
        "target",
        "unfed",
        "unfed_draft",
        "work",
    )

    def __init__(self, arrived: float, prompt: int, output: int) -> None:
        self.arrived = arrived
        self.first = self.ended = -1.0
        self.output = self.left = output
        self.unfed = self.unfed_draft = prompt  # prompt tokens without prefill, at the target and at the draft
        self.run_on = 0  # tokens that the target may still decode autonomously
        self.orchestrator: Owner | None = None
        self.target: Target | None = None
        self.draft: Draft | None = None
        self.advance = 0  # number of the last advance
        self.flying = 0  # nodes in flight
        self.behind = 0  # known nodes of the same chain behind those in flight, when these were sent
        self.work: Work | None = None  # used by the draft


class State(Enum):
    FEEDING = 0  # prefill
    GROWING = 1
    AHEAD = 2
    IDLE = 3


class Work:
    """The work of a draft for one advance."""

    __slots__ = ("ahead_from", "began", "behind", "done_at", "flying", "number", "request", "state", "wanted")

    def __init__(self, request: Request, number: int, wanted: int) -> None:
        self.request = request
        self.number = number
        self.wanted = wanted
        self.state = State.IDLE
        self.done_at = 0  # number of the step that completes the wanted nodes
        self.flying = self.behind = 0
        self.began = -1.0  # time at which the wanted nodes were complete
        self.ahead_from = 0  # number of passes ahead before that time


class Advance(NamedTuple):
    """The orchestrator's message to a draft after a verdict: ``accepted`` nodes and the token at ``met`` are committed.
    The orchestrator waits for ``wanted`` nodes, or has ``flying`` nodes in flight. ``number`` -1 closes, 0 opens."""

    request: Request
    number: int
    wanted: int = 0
    flying: int = 0
    accepted: int = 0
    met: Met = Met.NOWHERE

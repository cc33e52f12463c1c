"""The values of one round: what may be drafted, what was proposed, and the record of what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from specdec.core.rounds import Timings, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree


class Source(StrEnum):
    """Where draft tokens come from."""

    DRAFT = "draft"
    SELF_DRAFT = "self_draft"
    LOOKUP = "prompt_lookup"


@dataclass(frozen=True, slots=True)
class Grant:
    """At most ``num_tokens`` draft tokens of one source. ``waits``: the round waits for them, else it takes those that
    are there."""

    source: Source
    num_tokens: int
    waits: bool = False


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The plan of the next round.

    ``grants``: the best source first; the first one that has tokens is verified. ``num_autonomous``: autonomous
    tokens allowed after this round, those in flight included. ``round_s``: seconds of a round with 0, 1, ... nodes;
    of an arrived tree the part with the most tokens per second is verified (empty: the most likely nodes).
    ``self_draft_nodes``: at most, of a tree that the target drafts itself where it has none. ``deadline_s``: how long
    the round waits for a draft. ``next_round_after_s``: the next round may be sent before the verdict, so long after
    this one (pipelined verification); None: it may not.
    """

    grants: tuple[Grant, ...] = ()
    num_autonomous: int = 0
    round_s: Sequence[float] = ()
    deadline_s: float = 1.0
    next_round_after_s: float | None = None
    self_draft_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Drafting:
    """What the draft service did for one round.

    ``num_asked``: draft tokens that the round waited for. ``waited_s``: time spent waiting; None: no wait. ``answer``:
    number of tokens and seconds of the last request that the draft answered, or failed to answer in time. ``arrived``:
    whether a tree had arrived when the draft was asked for more; None: it was not asked. ``hit``: a tree was
    there at the last verdict. ``num_received``: nodes received since the last round.
    """

    num_asked: int = 0
    waited_s: float | None = None
    answer: tuple[int, float] | None = None
    arrived: bool | None = None
    hit: bool = False
    num_received: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """The tree to verify and its source (None: no tree), and what the draft service did."""

    tree: TokenTree = EMPTY_TREE
    source: Source | None = None
    drafting: Drafting = Drafting()


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a verdict took.

    ``round_trip_s``: from the round to its verdict, or from the verdict before if the round was ``pipelined``; None: an
    autonomous verdict, or the answer to an open. ``num_live``: sequences at the target's replica.
    """

    round_trip_s: float | None = None
    pipelined: bool = False
    num_live: int = 1


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round and what it took. Written once, next to the loop; read by the policy, the statistics and the metrics.

    ``number`` is 0 for the answer to an open, which verifies nothing. ``verified_tree``: the tree that the target
    decided about, the proposed one or one that it drafted itself; ``source``: of this tree. ``accepted``: its accepted
    nodes. ``num_autonomous_left``: verdicts that follow without a round.
    """

    number: int
    base: int
    verified_tree: TokenTree = EMPTY_TREE
    source: Source | None = None
    accepted: tuple[int, ...] = ()
    drafting: Drafting = Drafting()
    timings: Timings = field(default_factory=Timings)
    num_autonomous_left: int = 0
    exchange: Exchange = Exchange()

    @classmethod
    def of(cls, proposal: Proposal, verdict: Verdict, exchange: Exchange) -> RoundRecord:
        return cls(
            number=verdict.round,
            base=verdict.base,
            verified_tree=verdict.self_draft or proposal.tree,
            source=Source.SELF_DRAFT if verdict.self_draft else proposal.source,
            accepted=verdict.accepted,
            drafting=proposal.drafting,
            timings=verdict.timings,
            num_autonomous_left=verdict.num_autonomous_left,
            exchange=exchange,
        )

    @property
    def num_nodes(self) -> int:
        return len(self.verified_tree)

    @property
    def pass_s(self) -> float:
        """The target's pass, with sampling."""
        return (self.timings.pass_us + self.timings.sample_us) / 1e6

"""The loop: draft K tokens, verify them in one pass of the target, commit up to K + 1, again.

    request -> Speculation (draft service) -> tree -> target service -> verdict -> Sequence -> client

The draft grows a trie ahead of the text, the target decides, the sequence alone holds the committed text. Failures are
handled elsewhere: a missing draft is an empty tree (orchestrator/drafting/speculation.py), a lost target is a replay
(orchestrator/target_client.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from orchestrator.control.controller import Controller
from orchestrator.drafting.speculation import Speculation
from orchestrator.rounds import Early, Proposal
from orchestrator.sequence import Sequence
from orchestrator.text import Piece
from specdec.core.rounds import Verdict
from specdec.core.tree import TokenTree


class Target(Protocol):
    """The side that verifies."""

    async def verify(self, sequence: Sequence, tree: TokenTree, run_on: int, early: Early | None) -> Verdict:
        """The next verdict of the target: the accepted nodes of ``tree`` and the token after them.

        A first token and a replay do not use the tree, and accept nothing of it. After this verdict the target may make
        up to ``run_on`` more autonomously. These answer the next calls, which pass empty trees. A verdict's own
        ``run_on`` tells how many follow, unless one of those calls asks for more or fewer.

        ``early`` gives the next round while this one is at the target (pipelined verification). If that round was sent
        and not dropped, the verdict's ``under_way`` is what is left of its tree, and is the tree of the next call.
        """


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop: the verified proposal, the verdict on it, and the new output."""

    proposal: Proposal
    verdict: Verdict
    piece: Piece


async def decode(
    sequence: Sequence, target: Target, speculation: Speculation, controller: Controller
) -> AsyncGenerator[Step, None]:
    """Generate ``sequence`` to its end."""
    plan = controller.plan(sequence)
    speculation.advance(sequence, plan)
    while not sequence.finished:
        proposal = await speculation.next(sequence)  # up to K draft tokens; empty when there is no draft
        # One pass, up to K + 1 tokens back.
        verdict = await target.verify(sequence, proposal.tree, plan.run_on, proposal.early)
        piece = sequence.extend(proposal.tree, verdict)  # stop ids, stop strings, length: token by token
        controller.observe(proposal, verdict)
        if not sequence.finished:
            plan = controller.plan(sequence)
            speculation.advance(sequence, plan, verdict.under_way)
        sequence.statistics.observe(proposal, verdict)
        yield Step(proposal, verdict, piece)

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
from orchestrator.rounds import Proposal, RoundPlan, RoundRecord
from orchestrator.sequence import Sequence
from orchestrator.text import Piece
from specdec.core.rounds import Verdict


class Target(Protocol):
    """The side that verifies."""

    async def verify(self, sequence: Sequence, proposal: Proposal, plan: RoundPlan) -> tuple[Verdict, RoundRecord]:
        """The next verdict of the target, and the record of the round: the accepted nodes of the proposed tree and the
        token after them.

        A first token and a replay do not use the tree, and accept nothing of it. After this verdict the target may make
        up to ``plan.num_autonomous`` more autonomously. These answer the next calls, which pass empty trees. A
        verdict's ``num_autonomous`` tells how many follow, unless one of those calls asks for more or fewer.
        """


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the loop: the record of the round, and the new output."""

    record: RoundRecord
    piece: Piece


async def decode(
    sequence: Sequence, target: Target, speculation: Speculation, controller: Controller
) -> AsyncGenerator[Step, None]:
    """Generate ``sequence`` to its end."""
    plan = controller.plan(sequence)  # how many draft tokens (K), from which source
    speculation.advance(sequence, plan)
    while not sequence.finished:
        proposal = await speculation.next(sequence)  # K draft tokens at most; empty when there is no draft
        verdict, record = await target.verify(sequence, proposal, plan)  # one pass, up to K + 1 tokens back
        piece = sequence.extend(
            record.proposal.tree, verdict, record.proposal.source
        )  # stop ids, stop strings, length: token by token
        controller.observe(record)
        if not sequence.finished:
            plan = controller.plan(sequence)
            speculation.advance(sequence, plan, verdict)
        sequence.statistics.observe(record)
        yield Step(record, piece)

"""The loop: draft K tokens, verify them in one pass of the target, commit up to K + 1, again.

    request -> Speculation (draft service) -> tree -> target service -> verdict -> Sequence -> client

The draft grows a trie ahead of the text, the target decides, the sequence alone holds the committed text. Failures are
handled elsewhere: a missing draft is an empty tree (orchestrator/drafting/speculation.py), a lost target is a replay
(orchestrator/verifying/target_client.py).
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
    """The side that verifies: RoundClock around TargetClient."""

    async def verify(self, sequence: Sequence, proposal: Proposal, plan: RoundPlan) -> tuple[Verdict, RoundRecord]:
        """The next verdict of the target, and the record of the round: the accepted nodes of the verified tree and the
        token after them. The verified tree is the proposed one, or one that the target drafted itself.

        A first token and a replay do not use the tree, and accept nothing of it. After this verdict the target may
        decode up to ``plan.num_autonomous`` more tokens autonomously. These answer the next calls, which pass empty
        trees. ``num_autonomous_left`` of a verdict says how many follow, unless a call asks for more or fewer.
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
        piece = sequence.extend(record.verified_tree, verdict, record.source)  # up to a stop token, string or length
        controller.observe(record)
        if not sequence.finished:
            plan = controller.plan(sequence)
            speculation.advance(sequence, plan, verdict)
        sequence.statistics.count_round(record)
        yield Step(record, piece)

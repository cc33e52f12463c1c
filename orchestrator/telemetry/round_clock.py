"""The time of a sequence's rounds, split into parts, measured next to the loop.

Knows when the loop asks its target, gets the answer, puts its chunk and continues; does not know what a round decides.
The parts of a split add up to the time that passed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

from orchestrator.rounds import Proposal, RoundPlan, RoundRecord
from orchestrator.sequence import Sequence
from orchestrator.verifying.target_client import TargetClient
from specdec.core.rounds import Timings, Verdict


@dataclass(slots=True)
class Split:
    """Seconds of one round, or of many.

    ``draft``: waiting for draft tokens. ``queue``, ``model_pass``, ``sample``: at the target. ``network``: the rest of
    the time to the verdict, that is the wire and the event loops at both ends. ``open``: time to the first verdict on a
    replica, with prefill and replay. ``orchestrator``: its own work. ``client``: waiting for room for what is sent.
    """

    draft: float = 0.0
    network: float = 0.0
    queue: float = 0.0
    model_pass: float = 0.0
    sample: float = 0.0
    open: float = 0.0
    orchestrator: float = 0.0
    client: float = 0.0

    @property
    def total(self) -> float:
        seconds: float = sum(getattr(self, part) for part in PARTS)
        return seconds

    def add(self, other: Split) -> None:
        for part in PARTS:
            setattr(self, part, getattr(self, part) + getattr(other, part))


PARTS = tuple(field.name for field in fields(Split))


class RoundClock:
    """The loop's target (see orchestrator.decoder.Target): measures time, and makes the record of each round."""

    def __init__(self, target: TargetClient) -> None:
        self._target = target
        self._continued = self._asked = self._answered = time.monotonic()
        self._work_s = self._client_s = 0.0  # since the last split
        self._handing = 0.0

    async def verify(self, sequence: Sequence, proposal: Proposal, plan: RoundPlan) -> tuple[Verdict, RoundRecord]:
        self._asked = time.monotonic()
        verdict = await self._target.verify(sequence, proposal.tree, plan)
        self._answered = time.monotonic()
        return verdict, RoundRecord.of(proposal, verdict, self._target.exchange)

    def split(self, record: RoundRecord) -> Split:
        """The split of the round that the loop has just yielded, with what was sent after the round before."""
        self._handing = now = time.monotonic()
        waited_s = self._answered - self._asked
        split = Split(
            draft=self._asked - self._continued,
            orchestrator=self._work_s + now - self._answered,
            client=self._client_s,
        )
        if record.number:
            _share(split, waited_s, record.timings)
        else:
            split.open = waited_s
        return split

    def hands_over(self) -> None:
        """The round is measured: the time from now on is the client's."""
        now = time.monotonic()
        self._work_s = now - self._handing
        self._handing = now

    def continues(self) -> None:
        """The loop continues with its next round."""
        self._continued = time.monotonic()
        self._client_s = self._continued - self._handing


def _share(split: Split, waited_s: float, timings: Timings) -> None:
    """Split the wait for the target. Its work before ``verify`` was called is no part of the round."""
    split.model_pass = min(waited_s, timings.pass_us / 1e6)
    left_s = waited_s - split.model_pass
    split.sample = min(left_s, timings.sample_us / 1e6)
    left_s -= split.sample
    split.queue = min(left_s, timings.queue_us / 1e6)
    split.network = left_s - split.queue

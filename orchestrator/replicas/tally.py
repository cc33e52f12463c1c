"""What one draft replica was good for, as its orchestrator saw it: plain totals, added to once per round.

Knows numbers; refuses to know who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Since the endpoint was found. A round is put down to the replica that its sequence has when it ends."""

    num_rounds: int = 0  # with draft tokens
    num_draft_tokens: int = 0  # verified
    num_accepted_tokens: int = 0
    num_late: int = 0  # rounds that gave up waiting
    wait_s: float = 0.0

"""What is compared: the target alone, a draft that is waited for, and one that grows ahead of the verdict.

Knows names and what each mode asks of which orchestrator; refuses to know models and distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.v1 import common_pb2

COUPLED = common_pb2.VERIFICATION_METHOD_COUPLED
BLOCK = common_pb2.VERIFICATION_METHOD_BLOCK


@dataclass(frozen=True, slots=True)
class Mode:
    """``front`` is the orchestrator that is asked; None draft tokens: as many as pay."""

    name: str
    front: str
    num_draft_tokens: int | None
    method: common_pb2.VerificationMethod = COUPLED

    @property
    def learns(self) -> bool:
        """How much to draft."""
        return self.num_draft_tokens is None


ALONE = Mode("alone", "near", 0)
ADAPTIVE = Mode("sync, adaptive", "near", None)
AHEAD = Mode("ahead", "ahead", None)
ASTRAY = Mode(AHEAD.name, "strange", None)
"""Ahead with a draft that has nothing in common with the target."""


def sync(num_draft_tokens: int) -> Mode:
    return Mode(f"sync, K = {num_draft_tokens}", "near", num_draft_tokens)


def block(num_draft_tokens: int) -> Mode:
    return Mode(f"block, K = {num_draft_tokens}", "near", num_draft_tokens, method=BLOCK)


def is_fixed(name: str) -> bool:
    """Whether it is the name of a synchronous draft with a set number of tokens, coupled (or greedy)."""
    return name.startswith("sync, K")


def modes(temperature: float, fixed: Sequence[int], with_block: bool, quick: bool) -> list[Mode]:
    """Block verification differs from coupled sampling only where something is drawn, and is never grown ahead.

    ``quick`` leaves at temperature 1 one K, in the middle, and no adaptive one.
    """
    if not temperature:
        return [ALONE, *map(sync, fixed), ADAPTIVE, AHEAD]
    counts = fixed[len(fixed) // 2 :][:1] if quick else fixed
    return [
        ALONE,
        *map(sync, counts),
        *([] if quick else [ADAPTIVE]),
        AHEAD,
        *(map(block, counts) if with_block else ()),
    ]

"""The compared modes: the target alone, a synchronous draft, and a draft that grows ahead of the verdict.

Knows the names, the request options and the orchestrator of each mode; does not know models and distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.v1 import common_pb2

COUPLED = common_pb2.VERIFICATION_METHOD_COUPLED
BLOCK = common_pb2.VERIFICATION_METHOD_BLOCK


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode. ``front`` names its orchestrator; ``num_draft_tokens`` None: adaptive."""

    name: str
    front: str
    num_draft_tokens: int | None
    method: common_pb2.VerificationMethod = COUPLED


ALONE = Mode("alone", "near", 0)
ADAPTIVE = Mode("sync, adaptive", "near", None)
AHEAD = Mode("ahead", "ahead", None)
UNRELATED = Mode(AHEAD.name, "unrelated", None)
"""The mode ahead with a draft that has nothing in common with the target."""


def sync(num_draft_tokens: int) -> Mode:
    return Mode(f"sync, K = {num_draft_tokens}", "near", num_draft_tokens)


def block(num_draft_tokens: int) -> Mode:
    return Mode(f"block, K = {num_draft_tokens}", "near", num_draft_tokens, method=BLOCK)


def modes(temperature: float, fixed: Sequence[int], with_block: bool, quick: bool) -> list[Mode]:
    """The modes at a temperature. Block verification differs from coupled sampling only above 0, and never grows ahead.

    ``quick`` keeps only the middle K at temperatures above 0, and leaves out the adaptive mode there.
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

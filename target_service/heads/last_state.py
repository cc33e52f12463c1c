"""What heads share that read one state of the target: that of the last token before the root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from target_service.self_draft.trees import Growing, Guesses, Passed, SelfDraftState


@dataclass(slots=True)
class LastState:
    """The state [hidden_size] of the last of ``num_rows`` rows. ``by_depth``: guesses while a tree grows."""

    num_rows: int = 0
    state: Tensor | None = None
    by_depth: list[Guesses] = field(default_factory=list)


class OfLastState:
    """The part of target_service.self_draft.trees.Head that keeps this state."""

    def open(self, salt: bytes) -> LastState:
        return LastState()

    def num_rows(self, memory: SelfDraftState) -> None:
        return None

    def learn(self, passed: Passed) -> None:
        """Take the state of the last row that was kept."""
        assert passed.taps is not None
        memory: LastState = passed.memory.of_head
        memory.num_rows, memory.state = passed.start + len(passed.taps), passed.taps[-1]

    def begin(self, growing: Sequence[Growing]) -> list[Growing]:
        """Those with the state of the last token before the root."""
        return [each for each in growing if each.memory.of_head.num_rows == len(each.ids) - 1]

    def end(self, growing: Sequence[Growing]) -> None:
        pass

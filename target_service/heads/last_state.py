"""What heads share that read one state of the target: that of the last token before the root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from target_service.self_draft.trees import Candidates, GrowingDraft, Passed


@dataclass(slots=True)
class LastState:
    """The state [hidden_size] of the last of ``num_rows`` rows. ``by_depth``: candidates while a tree grows."""

    num_rows: int = 0
    state: Tensor | None = None
    by_depth: list[Candidates] = field(default_factory=list)

    @property
    def known(self) -> Tensor:
        assert self.state is not None, "a head drafts only from a known state"
        return self.state


class OfLastState:
    """The part of target_service.self_draft.trees.Head that keeps this state."""

    def open(self, salt: bytes) -> LastState:
        return LastState()

    def num_rows(self, state: LastState) -> None:
        return None

    def learn(self, state: LastState, passed: Passed) -> None:
        """Take the state of the last row that was kept."""
        assert passed.taps is not None
        state.num_rows, state.state = passed.start + len(passed.taps), passed.taps[-1]

    def begin(self, drafts: Sequence[GrowingDraft[LastState]]) -> list[GrowingDraft[LastState]]:
        """Those with the state of the last token before the root."""
        return [draft for draft in drafts if draft.state.num_rows == len(draft.request.ids) - 1]

    def end(self, drafts: Sequence[GrowingDraft[LastState]]) -> None:
        pass

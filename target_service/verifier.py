"""What stands behind a target's rounds: the model, its KV cache and the sampling, as the engine sees them.

Plain data and a protocol; imports no torch, so that a model made of a table can stand there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.core.errors import SpecdecError
from specdec.core.rounds import Features, ModelInfo, Timings
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class TargetOpen:
    """A sequence as this service opens it."""

    spec: SequenceSpec
    stop_token_ids: frozenset[int] = frozenset()
    return_predictions: bool = False
    age_s: float = 0.0  # of the request; a replay keeps it
    num_preemptions: int = 0  # so far, of this sequence, anywhere
    return_features: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence of a pass. ``ids`` are all committed ids; the tree hangs from the last of them."""

    memory: Any
    ids: Sequence[int]
    tree: TokenTree
    return_features: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What the target made of a job: accepted nodes, root downwards, the token after them, its own token at the
    root and at each node (empty where the method has none; the root's alone where there was no memory for the tree),
    and if asked for the root's and the accepted nodes' features."""

    accepted: tuple[int, ...]
    next_token: int
    predictions: tuple[int, ...] = ()
    features: Features | None = None


class Verifier(Protocol):
    """The model, its KV cache and the sampling."""

    info: ModelInfo

    @property
    def block_size(self) -> int:
        """Full blocks of so many equal ids, after equal text, are in the KV cache once; 0: nothing is shared."""

    def open(self, spec: SequenceSpec) -> Any:
        """The memory of a new sequence; it takes no KV slots yet, which only passes do."""

    def close(self, memory: Any) -> None: ...

    def verify(self, jobs: Sequence[Job]) -> tuple[Sequence[Decision | SpecdecError | None], Timings]:
        """One pass; who is first in ``jobs`` gets memory first, and a tree only what all texts leave.

        An error ends its sequence alone, but Preempted says that there was no memory for this job: some sequence's
        is taken, and the job comes again. None: a long prefill goes on in the next pass.
        """

    def cache_use(self) -> tuple[int, int]:
        """KV slots taken and in total."""

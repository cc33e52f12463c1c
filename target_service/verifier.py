"""The interface between the target's engine and a model with its KV cache and sampling.

Plain data and a protocol; imports no torch, so that a table model can implement it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from specdec.core.errors import SpecdecError
from specdec.core.rounds import Logprobs, ModelInfo, TargetOpen, Timings
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree

MAX_SELF_DRAFT_NODES = 64
"""Nodes of a self-draft at most."""

StateT = TypeVar("StateT")
"""What a verifier keeps of a sequence."""


@dataclass(frozen=True, slots=True)
class Job(Generic[StateT]):
    """One sequence of a pass. ``ids`` are all committed ids; the tree hangs from the last of them.
    ``self_draft_nodes``: at most, of a tree that the target drafts itself, because there is no other."""

    open: TargetOpen
    state: StateT
    ids: Sequence[int]
    tree: TokenTree = EMPTY_TREE
    self_draft_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The accepted nodes of a job, root downwards, and the token after them. ``predictions``: the target's own token at
    the root and at each node; empty if the method has none, the root's only if there was no memory for the tree.
    ``refused``: the tree was not verified, because it has a token that its distribution does not give. ``logprobs``: of
    the accepted tokens and the next one, if requested. ``prompt_logprobs`` and ``num_cached_tokens`` are those of the
    sequence's first decision: of its prompt's tokens but the first, if requested, and how many tokens were in the
    cache. ``self_draft``: the tree that the target drafted and verified."""

    accepted: tuple[int, ...]
    next_token: int
    predictions: tuple[int, ...] = ()
    refused: bool = False
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int = 0
    self_draft: TokenTree = EMPTY_TREE


class Verifier(Protocol[StateT]):
    """The model, its KV cache and the sampling."""

    info: ModelInfo

    @property
    def block_size(self) -> int:
        """Ids per block of the KV cache, which holds equal full blocks after equal text once; 0: nothing is shared."""

    def open(self, spec: SequenceSpec) -> StateT:
        """The state of a new sequence. It takes no KV slots yet: only passes take slots."""

    def close(self, state: StateT) -> None: ...

    def verify(self, jobs: Sequence[Job[StateT]]) -> tuple[Sequence[Decision | SpecdecError | None], Timings]:
        """One pass. Memory goes to the jobs in order, first to all texts, then to trees.

        An error ends that sequence only. Preempted means that there was no memory for this job: the engine ends some
        sequence and submits the job again. None: a long prefill continues in the next pass.
        """

    def cache_use(self) -> tuple[int, int]:
        """KV slots used, and KV slots in total."""

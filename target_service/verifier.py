"""The interface between the target's engine and a model with its KV cache and sampling.

Plain data and a protocol; imports no torch, so that a table model can implement it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.core.errors import SpecdecError
from specdec.core.rounds import Logprobs, ModelInfo, Timings
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree

MAX_SELF_DRAFT_NODES = 64
"""Nodes of a self-draft at most."""


@dataclass(frozen=True, slots=True)
class TargetOpen:
    """A sequence as this service opens it."""

    spec: SequenceSpec
    stop_token_ids: frozenset[int] = frozenset()
    age_s: float = 0.0  # of the request; a replay keeps it
    num_preemptions: int = 0  # of this sequence so far, on any target
    num_logprobs: int | None = None  # likeliest tokens beside each token; None: no logprobs
    num_prompt_logprobs: int | None = None
    max_self_draft_nodes: int = 0  # see Round.self_draft_nodes


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence of a pass. ``ids`` are all committed ids; the tree hangs from the last of them. The rest is what
    was requested at its open."""

    memory: Any
    ids: Sequence[int]
    tree: TokenTree
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    max_self_draft_nodes: int = 0
    self_draft_nodes: int = 0
    """Nodes at most of a tree that the target drafts itself, because there is no other."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The accepted nodes of a job, root downwards, and the token after them. ``predictions``: the target's own token at
    the root and at each node; empty if the method has none, the root's only if there was no memory for the tree.
    ``refused``: the tree was not verified, because it has a token that its distribution does not give. ``logprobs``: of
    the accepted tokens and the next one, if requested. ``prompt_logprobs`` and ``num_cached_tokens`` are those of the
    sequence's first decision: of its prompt's tokens but the first, if requested, and how many tokens were found in the
    cache."""

    accepted: tuple[int, ...]
    next_token: int
    predictions: tuple[int, ...] = ()
    refused: bool = False
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int = 0
    self_draft: TokenTree = EMPTY_TREE
    """The tree that the target drafted and verified."""


class Verifier(Protocol):
    """The model, its KV cache and the sampling."""

    info: ModelInfo

    @property
    def block_size(self) -> int:
        """Ids per block of the KV cache, which holds equal full blocks after equal text once; 0: nothing is shared."""

    def open(self, spec: SequenceSpec) -> Any:
        """The memory of a new sequence. It takes no KV slots yet: only passes take slots."""

    def close(self, memory: Any) -> None: ...

    def verify(self, jobs: Sequence[Job]) -> tuple[Sequence[Decision | SpecdecError | None], Timings]:
        """One pass. Memory goes to the jobs in order, first to all texts, then to trees.

        An error ends that sequence only. Preempted means that there was no memory for this job: the engine ends some
        sequence and submits the job again. None: a long prefill continues in the next pass.
        """

    def cache_use(self) -> tuple[int, int]:
        """KV slots used, and KV slots in total."""

"""What a verifier keeps of a sequence, and the rows that a job brings to a pass. Knows texts and caches; does not know
the model.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.core.rounds import Logprobs
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.rows import Segment
from specdec.sampling.grammar import Compiled
from specdec.sampling.state import SamplingState
from target_service.verifier import Decision, Job


@dataclass(slots=True)
class Memory:
    spec: SequenceSpec  # without ids once there is a state
    grammar: Future[Compiled] | None
    sampling: SamplingState | None  # None: the grammar is not compiled yet
    cache: SequenceCache
    num_cached: int = 0  # tokens found in the cache
    num_held: int = 0  # passes in a row for which its grammar had no time
    self_draft: Any = None  # what the self-drafter knows of it
    self_draft_failed: bool = False  # nothing drafts for it any more
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # from the prompt's second token on


SLOW_ROW_S = 0.001
"""Processor time for a row from which on a grammar is slow."""

_SLOW_SHARE, MAX_SLOW_S = 0.2, 0.01
"""The share of the time that slow grammars may take from other sequences, and how much of it at once."""


class SlowGrammars:
    """Which sequences with slow grammars are in a pass. They take turns, and wait while others need the time."""

    def __init__(self) -> None:
        self._left_s, self._at = MAX_SLOW_S, 0.0

    def choose(self, jobs: list[Job], ready: set[int], now: float) -> set[int]:
        """The ``ready`` jobs, by index, of the pass that begins at ``now``. A slow one may lose its tree."""
        self._left_s = min(MAX_SLOW_S, self._left_s + _SLOW_SHARE * (now - self._at))
        self._at = now
        row_s = {index: jobs[index].memory.sampling.transforms.row_s for index in ready}
        slow = [index for index in ready if row_s[index] > SLOW_ROW_S]
        chosen = ready.difference(slow)
        for index in sorted(slow, key=lambda index: (-jobs[index].memory.num_held, index)):
            job, memory = jobs[index], jobs[index].memory
            if chosen and self._left_s <= 0.0:
                memory.num_held += 1
                continue
            if row_s[index] * (1 + len(job.tree)) > MAX_SLOW_S and memory.spec.keyed_by_token:
                jobs[index] = job = replace(job, tree=EMPTY_TREE, self_draft_nodes=0)
            self._left_s -= row_s[index] * (1 + len(job.tree))
            memory.num_held = 0
            chosen.add(index)
        return chosen


def rows_kept(segment: Segment, job: Job, decision: Decision | None) -> list[int]:
    """The rows to keep in the cache: those of committed text and of accepted nodes."""
    if decision is None:
        return list(range(len(segment.token_ids)))
    first_node = len(segment.token_ids) - len(job.tree)
    return [*range(first_node), *(first_node + node for node in decision.accepted)]


def prompt_rows(job: Job, num_context: int) -> int:
    """Rows from ``num_context`` on that need logits, because a token of the prompt follows; 0: none."""
    if job.num_prompt_logprobs is None:
        return 0
    spec: SequenceSpec = job.memory.spec
    return max(0, spec.num_prompt_tokens - 1 - num_context)


def ends_with_root(segment: Segment, job: Job) -> bool:
    """Whether all text is computed, so that there is a decision."""
    return segment.num_context + len(segment.token_ids) >= len(job.ids)


def segment_of(job: Job, num_rows: int) -> Segment:
    """The next ``num_rows`` committed ids that are not cached, and the tree if the last of these ids is the root."""
    cache: SequenceCache = job.memory.cache
    num_context = len(cache)
    root = num_rows - 1
    ends_with_root = num_context + num_rows == len(job.ids)
    tree = job.tree if ends_with_root else EMPTY_TREE
    cache.take(num_rows + len(tree))
    return Segment(
        token_ids=[*job.ids[num_context : num_context + num_rows], *tree.token_ids],
        parents=[*range(-1, root), *(root + 1 + parent for parent in tree.parents)],
        num_context=num_context,
        block_table=cache.block_table,
        logit_rows=range(
            0 if prompt_rows(job, num_context) else root if ends_with_root else num_rows, num_rows + len(tree)
        ),
    )

"""What a verifier keeps of a sequence, and the rows that a job brings to a pass. Knows texts and caches; does not know
the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.core.rounds import Logprobs
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.rows import Segment
from specdec.sampling.state import SamplingState
from target_service.verifier import Decision, Job


@dataclass(slots=True)
class Memory:
    spec: SequenceSpec  # without ids once there is a state
    sampling: SamplingState | None  # None: the grammar is not compiled yet
    cache: SequenceCache
    num_cached: int = 0  # tokens found in the cache
    own: Any = None  # of what drafts beside the target
    own_failed: bool = False  # nothing drafts for it any more
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # from the prompt's second token on


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

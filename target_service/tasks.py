"""What a language model keeps of a sequence, and a job on its way through a pass: the rows that it brings, and what
becomes of them. Knows texts and caches; does not know the model.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from specdec.core.errors import SpecdecError
from specdec.core.rounds import Logprobs
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.kvcache.block_pool import PoolFullError, SequenceCache
from specdec.passes.outputs import RowOutputs
from specdec.passes.rows import Segment
from specdec.sampling.grammar import Compiled
from specdec.sampling.state import SamplingState
from target_service.decision import Case
from target_service.verifier import Decision, Job


@dataclass(slots=True)
class LmState:
    cache: SequenceCache
    grammar: Future[Compiled] | None
    sampling: SamplingState | None = None  # None: the grammar is not compiled yet
    num_cached: int = 0  # tokens that were in the cache
    num_missed: int = 0  # passes in a row for which its grammar had no time
    self_draft: Any = None  # the self-drafter's state
    self_draft_failed: bool = False  # nothing drafts for it any more
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # from the prompt's second token on

    def begin(self, spec: SequenceSpec) -> None:
        """Raises InvalidArgument for a bad grammar, or an output that does not follow it."""
        mask = self.grammar.result().mask() if self.grammar is not None else None
        self.sampling = SamplingState(spec, mask)

    def stop_drafting(self) -> None:
        self.self_draft, self.self_draft_failed = None, True


@dataclass(slots=True, eq=False)
class Task:
    """A job in a pass. Its outcome is ``error`` or ``decision``; neither: its prefill continues in the next pass."""

    job: Job[LmState]
    tree: TokenTree = field(init=False)  # to verify: the job's, a self-draft, or none for lack of time or memory
    self_draft_nodes: int = field(init=False)
    self_drafted: bool = False
    segment: Segment = field(init=False)  # set by ``feed``
    outputs: RowOutputs = field(init=False)  # set by the pass
    kept: list[int] | None = None  # rows of the segment that stay in the cache; None: the pass is of no use
    decision: Decision | None = None
    error: SpecdecError | None = None

    def __post_init__(self) -> None:
        self.tree, self.self_draft_nodes = self.job.tree, self.job.self_draft_nodes

    @property
    def state(self) -> LmState:
        return self.job.state

    @property
    def sampling(self) -> SamplingState:
        assert self.state.sampling is not None, "it is not in a pass before its grammar is compiled"
        return self.state.sampling

    @property
    def case(self) -> Case:
        return Case(self.sampling, self.job.ids, self.tree)

    def num_prompt_rows(self, num_context: int) -> int:
        """Rows from ``num_context`` on that need logits, because a token of the prompt follows; 0: none."""
        if self.job.open.num_prompt_logprobs is None:
            return 0
        return max(0, self.job.open.spec.num_prompt_tokens - 1 - num_context)

    def feed(self, num_rows: int) -> None:
        """Make the segment: the next ``num_rows`` committed ids that are not cached, and the tree if the last of these
        ids is the root. Without memory for the tree it is dropped."""
        ids, cache = self.job.ids, self.state.cache
        num_context, root = len(cache), num_rows - 1
        ends_with_root = num_context + num_rows == len(ids)
        tree = self.tree if ends_with_root else EMPTY_TREE
        try:
            cache.take(num_rows + len(tree))
        except PoolFullError:
            tree = self.tree = EMPTY_TREE
            cache.take(num_rows)
        token_ids = [*ids[num_context : num_context + num_rows], *tree.token_ids]
        parents = [*range(-1, root), *(root + 1 + parent for parent in tree.parents)]
        first_logits = 0 if self.num_prompt_rows(num_context) else root if ends_with_root else num_rows
        logit_rows = range(first_logits, len(token_ids))
        draw = self.sampling.draw(len(ids)) if self.sampling.draws_by_logits else None
        self.segment = Segment(
            token_ids, parents, num_context, block_table=cache.block_table, logit_rows=logit_rows, draw=draw
        )

    @property
    def num_text_rows(self) -> int:
        return len(self.segment.token_ids) - (len(self.tree) if self.ends_with_root else 0)

    @property
    def ends_with_root(self) -> bool:
        """Whether the segment has all text that was not cached, so that there is a decision."""
        return self.segment.num_context + len(self.segment.token_ids) >= len(self.job.ids)

    @property
    def tree_outputs(self) -> RowOutputs:
        """Of the root and the nodes."""
        return self.outputs.behind(len(self.segment.logit_rows) - 1 - len(self.tree))

    @property
    def rows_to_keep(self) -> list[int]:
        """Rows of committed text and of accepted nodes."""
        num_text_rows, accepted = self.num_text_rows, self.decision.accepted if self.decision else ()
        return [*range(num_text_rows), *(num_text_rows + node for node in accepted)]

"""vLLM as a verifier of chains. Knows jobs and sequences; does not know sampling (target_service.vllm_decisions)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.core.errors import PassFailed, Preempted, SpecdecError
from specdec.core.rounds import (
    CACHE_SALT,
    GRAMMAR,
    LOGPROBS,
    RESTRICTIONS,
    SELF_DRAFT,
    TRANSFORMS,
    ModelInfo,
    Timings,
)
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.speculation.prompt_lookup import PromptLookup
from specdec.vllm.passes import Outcome, PromptLogprobsRequest
from target_service.self_draft.text_lookup import TextLookup, chain_of
from target_service.verifier import Decision, Job
from target_service.vllm_decisions import ChainReport, ChainRequest

if TYPE_CHECKING:
    from specdec.vllm.engine import VllmEngine

SAMPLER = "target_service.vllm_decisions:TargetSampler"


@dataclass(slots=True)
class VllmState:
    key: str = ""  # empty: unknown to vLLM
    draft: tuple[int, ...] = ()  # what vLLM's proposer drafted after its text
    lookup: PromptLookup | None = None


class VllmVerifier:
    """See target_service.verifier.Verifier. Of a tree its most likely chain is verified."""

    def __init__(self, engine: VllmEngine, info: ModelInfo, lookup: TextLookup | None = None) -> None:
        """``lookup``: drafts for the target, in the place of a proposer of vLLM's."""
        self._engine, self._lookup = engine, lookup
        capabilities = (*info.capabilities, TRANSFORMS, RESTRICTIONS, LOGPROBS, CACHE_SALT)
        capabilities = capabilities if engine.grammars is None else (*capabilities, GRAMMAR)
        self.info = dataclasses.replace(info, capabilities=capabilities, max_chain=engine.max_chain)
        name = lookup.kind if lookup is not None else engine.proposer.name if engine.proposer is not None else ""
        if name:
            self.info = dataclasses.replace(self.info, capabilities=(*capabilities, SELF_DRAFT), self_draft=name)

    @property
    def block_size(self) -> int:
        return self._engine.block_size

    def open(self, spec: SequenceSpec) -> VllmState:
        if self._engine.grammars is not None and spec.sampling.grammar:
            self._engine.grammars.compiled(spec.sampling.grammar)  # a bad one is refused here, not in the workers
        return VllmState(lookup=None if self._lookup is None else self._lookup.open(spec.cache_salt))

    def close(self, state: VllmState) -> None:
        if state.key:
            self._engine.remove(state.key)

    def cache_use(self) -> tuple[int, int]:
        return self._engine.cache_use()

    def verify(self, jobs: Sequence[Job[VllmState]]) -> tuple[list[Decision | SpecdecError | None], Timings]:
        started = time.perf_counter()
        trees = [job.tree or self._self_draft(job) for job in jobs]
        lookup_s = time.perf_counter() - started
        nodes = [tree.most_likely_chains()[: self._engine.max_chain] for tree in trees]
        chains, extras = {}, {}
        for job, tree, chain in zip(jobs, trees, nodes, strict=True):
            state = job.state
            state.key = state.key or self._add(job)
            chains[state.key] = [tree.token_ids[node] for node in chain]
            has_probs = tree.draft_probs and not job.open.spec.keyed_by_token
            draft_probs = tuple(tree.draft_probs[node] for node in chain) if has_probs else ()
            extras[state.key] = ChainRequest(draft_probs, job.open.num_logprobs)
        outcomes, rows = self._engine.run(chains, extras, self._num_drafts(jobs))
        decided = []
        for job, tree, chain in zip(jobs, trees, nodes, strict=True):
            outcome = outcomes[job.state.key]
            job.state.draft = outcome.draft
            decided.append(_decided(chain, outcome, self_draft=EMPTY_TREE if job.tree else tree))
        drafting_s = self._engine.drafting_s + lookup_s
        timings = Timings(
            pass_us=int((time.perf_counter() - started - drafting_s) * 1e6),
            rows=rows,
            sequences=sum(outcome.tokens is not None for outcome in outcomes.values()),
            self_draft_us=int(drafting_s * 1e6),
        )
        return decided, timings

    def _self_draft(self, job: Job[VllmState]) -> TokenTree:
        if job.state.lookup is None:
            return TokenTree.chain(job.state.draft[: job.self_draft_nodes])
        max_nodes = min(job.self_draft_nodes, self._engine.max_chain, self.info.context_length - len(job.ids))
        return chain_of(job.state.lookup, job.ids, max_nodes)

    def _num_drafts(self, jobs: Sequence[Job[VllmState]]) -> int | None:
        """Tokens to draft for the next pass, since a sequence that wants a self-draft now probably wants one then.
        None: no sequence of the pass ever does."""
        if self._engine.proposer is None or not any(job.open.max_self_draft_nodes for job in jobs):
            return None
        return min(max(job.self_draft_nodes for job in jobs), self._engine.max_chain)

    def _add(self, job: Job[VllmState]) -> str:
        spec, num_top = job.open.spec, job.open.num_prompt_logprobs
        prompt_logprobs = None if num_top is None else PromptLogprobsRequest(spec.num_prompt_tokens, num_top)
        payload = dataclasses.replace(spec, token_ids=())
        return self._engine.add(
            job.ids, spec.cache_salt, payload, prompt_logprobs=prompt_logprobs, adapter=job.open.adapter
        )


def _decided(chain: Sequence[int], outcome: Outcome, self_draft: TokenTree) -> Decision | SpecdecError | None:
    if outcome.no_memory:
        return Preempted("no KV blocks are free")
    if outcome.error is not None:
        return outcome.error
    if outcome.tokens is None:
        return None
    if not outcome.tokens:
        return PassFailed("the model computes NaN or infinity for the text of this sequence")
    accepted = tuple(chain[: len(outcome.tokens) - 1])
    report: ChainReport = outcome.extra
    return Decision(
        accepted,
        outcome.tokens[-1],
        refused=report.refused,
        logprobs=report.logprobs,
        prompt_logprobs=outcome.prompt_logprobs,
        num_cached_tokens=outcome.num_cached_tokens,
        self_draft=self_draft,
    )

"""What vLLM's workers draft after a pass: a target by vLLM's proposer, and a draft model by going on.

Knows vLLM's model runner V1 and its proposers; does not know the scheduler.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from specdec.runner.pass_timer import PassTimer
from specdec.vllm.passes import DraftingSampler, Place, Sampled, WorkerJob, WorkerSampler, sampled_by

Passed = Mapping[str, tuple[WorkerJob, Sampled]]


class SelfDrafts:
    """Replaces the draws of vLLM's proposer in one worker by the sampler's, and takes what it has drafted along.

    The proposer drafts in the pass that verifies: first it takes in the pass's rows, then it drafts a token at a time
    after each text, or (``parallel_drafting``) all tokens at once.
    """

    def __init__(self, runner: Any, sampler: DraftingSampler, passed: Passed, vocab_size: int) -> None:
        self._runner, self._sampler, self._passed, self._vocab_size = runner, sampler, passed, vocab_size
        self._finish, self._propose = runner.sample_tokens, runner.propose_draft_token_ids
        self._num_drawn = 0
        self._timer: PassTimer | None = None

    def install(self) -> None:
        self._runner.sample_tokens, self._runner.propose_draft_token_ids = self.finish, self.propose
        self._runner.drafter._sample_draft_tokens = self.draw

    def propose(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Draft tokens [sequences, num_drafts]."""
        if scheduler_output.num_drafts is None:
            num_sequences = len(self._runner.input_batch.req_ids)
            return torch.empty((num_sequences, 0), dtype=torch.int64, device=self._runner.device)
        self._num_drawn, self._timer = 0, PassTimer(self._runner.device)
        drafts: Tensor = self._propose(scheduler_output, *args, **kwargs)
        self._timer.stop()
        return drafts

    def draw(self, hidden_states: Tensor, _: Any) -> tuple[Tensor, None]:
        """``hidden_states`` [rows, hidden]: one row for each sequence, or as many as it drafts at once."""
        drafter = self._runner.drafter
        logits = drafter.model.compute_logits(hidden_states)[:, : self._vocab_size]
        num_rows = drafter.num_speculative_tokens if drafter.parallel_drafting else 1
        places: list[Place | None] = []
        for key in self._runner.input_batch.req_ids:
            job, sampled = self._passed.get(key, (None, Sampled()))
            first = job.num_ids + len(sampled.tokens) + self._num_drawn if job is not None else 0
            places += [None if job is None else Place(key, first + row) for row in range(num_rows)]
        self._num_drawn += num_rows
        places += [None] * (len(logits) - len(places))  # padding of a captured graph
        return self._sampler.draft(logits, places), None

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        self._timer = None
        output = self._finish(*args, **kwargs)
        if output is not None and self._timer is not None:
            output.drafting_s = self._timer.elapsed_s()
            if (taken := self._runner.take_draft_token_ids()) is not None:
                output.drafts = dict(zip(taken.req_ids, taken.draft_token_ids, strict=False))
        return output


class FurtherDrafts:
    """Lets a draft model go on after a pass: further tokens of each text, by passes of one row, in the same step.

    They are no part of vLLM's text, so nothing of them is taken back.
    """

    def __init__(self, runner: Any, sampler: WorkerSampler, passed: Passed, vocab_size: int) -> None:
        self._runner, self._sampler, self._passed, self._vocab_size = runner, sampler, passed, vocab_size
        self._finish = runner.sample_tokens
        self._drafts: dict[str, list[Any]] = {}

    def install(self) -> None:
        self._runner.sample_tokens, self._runner.propose_draft_token_ids = self.finish, self.propose

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        self._drafts = {}
        output = self._finish(*args, **kwargs)
        if output is not None:
            output.drafts = self._drafts
        return output

    @torch.inference_mode()
    def propose(self, scheduler_output: Any, *args: Any) -> list[list[int]]:
        """For vLLM there are no draft tokens."""
        keys: list[str] = self._runner.input_batch.req_ids
        if scheduler_output.num_drafts and all(key in self._passed for key in keys):
            steps = _Steps(self._runner, common=args[-2], num_sequences=len(keys))
            self._drafts = further_drafts(
                self._sampler,
                [self._passed[key] for key in keys],
                num_drafts=scheduler_output.num_drafts,
                logits_after=lambda token_ids: steps.logits_after(token_ids)[:, : self._vocab_size],
            )
        return [[] for _ in keys]


def further_drafts(
    sampler: WorkerSampler,
    passed: Sequence[tuple[WorkerJob, Sampled]],
    *,
    num_drafts: int,
    logits_after: Callable[[Sequence[int]], Tensor],
) -> dict[str, list[Any]]:
    """The sampler's extras of ``num_drafts`` tokens after each text of a pass, as far as there is a token.
    ``logits_after`` feeds a token of each text and returns [texts, vocab_size]."""
    drafts: dict[str, list[Any]] = {job.key: [] for job, _ in passed}
    jobs = [_following(job, sampled) for job, sampled in passed]
    for _ in range(num_drafts):
        if not all(job.chain for job in jobs):
            break  # nothing can be drawn after one of the texts
        logits = logits_after([job.chain[-1] for job in jobs])
        sound: list[bool] = logits.amax(-1).isfinite().tolist()  # NaN is the largest
        jobs = [
            dataclasses.replace(job, logits=logits[row : row + 1], sound=sound[row]) for row, job in enumerate(jobs)
        ]
        sampled = sampled_by(sampler, jobs)
        for job, result in zip(jobs, sampled, strict=True):
            drafts[job.key] += [result.extra] if result.tokens else []
        jobs = [dataclasses.replace(job, chain=[*result.tokens]) for job, result in zip(jobs, sampled, strict=True)]
    return drafts


def _following(job: WorkerJob, sampled: Sampled) -> WorkerJob:
    """What follows the tokens of the pass, which the text of the job has by now."""

    def ids(start: int) -> list[int]:
        return job.ids(start)[: max(0, job.num_ids - start)]

    return dataclasses.replace(job, ids=ids, chain=list(sampled.tokens))


class _Steps:
    """Passes of one row for each sequence of the last pass."""

    def __init__(self, runner: Any, common: CommonAttentionMetadata, num_sequences: int) -> None:
        """``common``: of the last pass, which is changed."""
        self._runner, self._common, self._num = runner, common, num_sequences
        device = common.seq_lens.device
        starts = torch.arange(num_sequences + 1, dtype=torch.int32)
        common.query_start_loc, common.query_start_loc_cpu = starts.to(device), starts
        common.num_reqs = common.num_actual_tokens = num_sequences
        common.max_query_len, common.causal = 1, True
        common.seq_lens = common.seq_lens[:num_sequences].clone()
        common.block_table_tensor = common.block_table_tensor[:num_sequences]
        if common.seq_lens_cpu_upper_bound is not None:
            common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound[:num_sequences].clone()
        common.is_prefilling = torch.zeros(num_sequences, dtype=torch.bool)

    def logits_after(self, token_ids: Sequence[int]) -> Tensor:
        """Feed a token of each sequence. Returns [sequences, vocab]."""
        runner, common, block_size = self._runner, self._common, self._runner.cache_config.block_size
        positions = common.seq_lens.long()
        blocks = common.block_table_tensor.gather(1, (positions // block_size)[:, None])[:, 0]
        common.slot_mapping = blocks.long() * block_size + positions % block_size
        common.seq_lens += 1
        common.max_seq_len += 1
        if common.seq_lens_cpu_upper_bound is not None:
            common.seq_lens_cpu_upper_bound += 1
        layers: dict[str, Any] = {}
        for group in itertools.chain.from_iterable(runner.attn_groups):
            layers |= dict.fromkeys(group.layer_names, group.get_metadata_builder().build(0, common))
        slots = dict.fromkeys(layers, common.slot_mapping)
        with set_forward_context(layers, runner.vllm_config, num_tokens=self._num, slot_mapping=slots):
            ids = torch.tensor(token_ids, dtype=torch.int32, device=positions.device)
            logits: Tensor = runner.model.compute_logits(runner.model(input_ids=ids, positions=positions))
        return logits

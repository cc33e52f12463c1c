"""What runs in vLLM's workers with model runner V2: a sampler of ours turns logits into tokens, and a draft goes on.

Knows vLLM's model runner V2; does not know the scheduler. V2 keeps texts, their lengths and their draft tokens on the
device, by slot (``req_states``), and is sent only how many draft tokens there are. So chains are written there before a
pass, and so is where a text ends that was taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from specdec.core.device import indices, sent
from specdec.vllm.passes import PromptLogprobsRequest, Sampled, WorkerJob, WorkerSampler, sampled_by
from specdec.vllm.worker import Origin, PromptLogprobs, new_sampler
from specdec.vllm.worker_drafts import further_drafts


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    model_runner: Any

    def install_sampler(self, path: str, vocab_size: int, grammars: Origin | None) -> None:
        sampler = new_sampler(path, self.model_runner.device, grammars)
        _Sampling(self.model_runner, sampler, vocab_size).install()


@dataclass(slots=True)
class _Text:
    ids: list[int]
    payload: Any
    prompt_logprobs: PromptLogprobsRequest | None  # until its prompt has ended


class _Sampling:
    """Replaces the sampling of one worker's model runner, and its draft tokens by chains from outside."""

    def __init__(self, runner: Any, sampler: WorkerSampler, vocab_size: int) -> None:
        self._runner, self._sampler, self._vocab_size = runner, sampler, vocab_size
        self._prompts = PromptLogprobs(runner.model.compute_logits, vocab_size)
        self._execute, self._finish = runner.execute_model, runner.sample_tokens
        self._texts: dict[str, _Text] = {}
        self._output: Any = None  # of the scheduler
        self._extras: dict[str, Any] = {}
        self._passed: dict[str, tuple[WorkerJob, Sampled]] = {}  # of the texts that the last pass has sampled
        self._drafts: dict[str, list[Any]] = {}
        self._no_drafts = torch.zeros_like(runner.req_states.draft_tokens)

    def install(self) -> None:
        self._runner.execute_model, self._runner.sample = self.execute, self.sample
        self._runner.sample_tokens, self._runner.speculator.propose = self.finish, self.propose
        self._runner.prompt_logprobs_worker.compute_prompt_logprobs = self.prompt_logprobs

    def execute(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._output = scheduler_output
        for key in scheduler_output.finished_req_ids:
            self._texts.pop(key, None)
            self._sampler.forget(key)
            self._prompts.forget(key)
        self._take_back(scheduler_output)
        self._write_chains(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:  # and those that were preempted, with what they had sampled
            wanted = new.sampling_params.extra_args
            request = wanted["prompt_logprobs"] if len(new.prefill_token_ids) == new.prompt_len else None
            self._texts[new.req_id] = _Text(list(new.prefill_token_ids), wanted["payload"], request)
        return self._execute(scheduler_output, *args, **kwargs)

    @torch.inference_mode()
    def _take_back(self, scheduler_output: Any) -> None:
        """Shorten what the scheduler has shortened."""
        states, cached = self._runner.req_states, scheduler_output.scheduled_cached_reqs
        last_tokens: dict[int, int] = {}
        for key, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            ids, length = self._texts[key].ids, scheduler_output.lengths[key]
            if length == len(ids):
                continue
            del ids[length:]
            slot = states.req_id_to_index[key]
            last_tokens[slot] = ids[-1]
            states.num_computed_tokens.stage_write_elem(slot, num_computed)
            states.total_len.stage_write_elem(slot, length)
            # For V2 the rows of a prompt are those before this position. The last token goes before a chain instead.
            num_prefilled = length - 1 if num_computed == length - 1 else length
            states.prefill_len.np[slot] = min(states.prefill_len.np[slot], num_prefilled)
        if last_tokens:
            states.apply_staged_writes()
            slots = indices(list(last_tokens), self._runner.device)
            states.last_sampled_tokens[slots, 0] = indices(list(last_tokens.values()), self._runner.device)

    @torch.inference_mode()
    def _write_chains(self, scheduler_output: Any) -> None:
        states, scheduled = self._runner.req_states, scheduler_output.scheduled_spec_decode_tokens
        chains = {states.req_id_to_index[key]: chain for key in scheduled if (chain := _chain(scheduled[key]))}
        if chains:
            width = max(map(len, chains.values()))
            rows = torch.tensor([[*chain, *[0] * (width - len(chain))] for chain in chains.values()])
            states.draft_tokens[indices(list(chains), self._runner.device), :width] = rows.to(self._runner.device)

    @torch.inference_mode()
    def sample(self, hidden_states: Tensor, batch: Any, _: Any) -> tuple[SamplerOutput, Tensor, Tensor]:
        """``hidden_states`` [rows, hidden]: of the pass. Returns also how many tokens of each sequence were sampled,
        and how many rows of it were rejected: its next pass computes these again."""
        logits = self._runner.model.compute_logits(hidden_states[batch.logits_indices])[:, : self._vocab_size]
        sound: list[bool] = logits.amax(-1).isfinite().tolist()  # of each row; NaN is the largest
        starts: list[int] = batch.cu_num_logits_np.tolist()
        jobs = {}
        for index, key in enumerate(batch.req_ids):
            text = self._texts[key]
            # vLLM pads a sequence that begins with one row: a chain of -1, which is not the caller's.
            chain = _chain(self._output.scheduled_spec_decode_tokens.get(key, ()))
            rows = slice(starts[index], starts[index] + 1 + len(chain))
            if batch.num_computed_tokens_np[index] + batch.num_scheduled_tokens[index] >= len(text.ids):
                jobs[index] = self._job(key, chain, logits=logits[rows], sound=all(sound[rows]))
        sampled = dict(zip(jobs, sampled_by(self._sampler, list(jobs.values())), strict=True))
        self._passed = {jobs[i].key: (jobs[i], result) for i, result in sampled.items()}
        self._extras = {jobs[i].key: result.extra for i, result in sampled.items() if result.extra is not None}
        tokens = [[0] * (1 + self._runner.num_speculative_steps) for _ in batch.req_ids]
        num_sampled, num_rejected = [0] * len(tokens), [0] * len(tokens)
        for index, result in sampled.items():
            self._texts[jobs[index].key].ids += result.tokens
            tokens[index][: len(result.tokens)] = result.tokens
            num_sampled[index] = len(result.tokens)
            num_rejected[index] = starts[index + 1] - starts[index] - len(result.tokens)
        output = SamplerOutput(
            sampled_token_ids=indices(tokens, logits.device),
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=indices(num_sampled, logits.device).int(),
            num_rejected=indices(num_rejected, logits.device).int(),
        )
        return output, output.num_sampled, output.num_rejected

    def _job(self, key: str, chain: Sequence[int], *, logits: Tensor, sound: bool) -> WorkerJob:
        text = self._texts[key]
        return WorkerJob(
            key=key,
            payload=text.payload,
            extra=self._output.extras.get(key),
            num_ids=len(text.ids),
            ids=lambda start: text.ids[start:],
            chain=chain,
            logits=logits,
            sound=sound,
        )

    def prompt_logprobs(self, _: Any, hidden_states: Tensor, batch: Any, *args: Any) -> dict[str, None]:
        """``hidden_states`` [rows, hidden]: of the pass. For vLLM there are none."""
        for index, key in enumerate(batch.req_ids):
            text, first = self._texts[key], int(batch.query_start_loc_np[index])
            if text.prompt_logprobs is not None and self._prompts.add(
                key,
                text.prompt_logprobs,
                text.ids[: self._output.lengths[key]],
                start=int(batch.num_computed_tokens_np[index]),
                hidden_states=hidden_states[first : first + int(batch.num_scheduled_tokens[index])],
            ):
                text.prompt_logprobs = None
        return {}

    @torch.inference_mode()
    def propose(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """For vLLM there are no draft tokens: what a model drafts by going on is no part of vLLM's text. Returns
        [sequences, draft tokens]."""
        num_drafts = self._output.num_drafts
        if num_drafts and all(key in self._passed for key in batch.req_ids):
            steps = _Steps(self._runner, batch)
            self._drafts = further_drafts(
                self._sampler,
                [self._passed[key] for key in batch.req_ids],
                num_drafts=num_drafts,
                logits_after=lambda token_ids: steps.logits_after(token_ids)[:, : self._vocab_size],
            )
        return self._no_drafts[: batch.num_reqs]

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        self._extras, self._drafts = {}, {}
        output = self._finish(*args, **kwargs)
        if output is not None:
            result = output.model_runner_output  # what travels; the rest waits for the device
            result.extras, result.drafts = self._extras, self._drafts
            result.prompt_logprobs = self._prompts.take_complete()
        return output


class _Steps:
    """Passes of one row for each sequence of the last pass."""

    def __init__(self, runner: Any, batch: Any) -> None:
        self._runner, self._slots, self._num = runner, batch.idx_mapping, batch.num_reqs
        self._positions = runner.req_states.num_computed_tokens.gpu[batch.idx_mapping].long()  # of the next rows
        self._max_length = int((batch.num_computed_tokens_np + batch.num_scheduled_tokens).max())
        self._starts = torch.arange(self._num + 1, dtype=torch.int32)
        self._starts_on_device = sent(self._starts, runner.device)
        self._blocks = runner.block_tables.gather_block_tables(batch.idx_mapping, self._num)

    def logits_after(self, token_ids: Sequence[int]) -> Tensor:
        """Feed a token of each sequence. Returns [sequences, vocab]."""
        runner, positions = self._runner, self._positions
        slots = runner.block_tables.compute_slot_mappings(self._slots, self._starts_on_device, positions, self._num)
        self._positions, self._max_length = positions + 1, self._max_length + 1
        metadata = build_attn_metadata(
            attn_groups=runner.attn_groups,
            num_reqs=self._num,
            num_tokens=self._num,
            query_start_loc_gpu=self._starts_on_device,
            query_start_loc_cpu=self._starts,
            max_query_len=1,
            seq_lens=self._positions.int(),
            max_seq_len=self._max_length,
            block_tables=self._blocks,
            slot_mappings=slots,
            kv_cache_config=runner.kv_cache_config,
            seq_lens_cpu_upper_bound=torch.full((self._num,), self._max_length, dtype=torch.int32),
            positions=positions,
            is_prefilling=torch.zeros(self._num, dtype=torch.bool),
        )
        by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
        with set_forward_context(metadata, runner.vllm_config, num_tokens=self._num, slot_mapping=by_layer):
            ids = sent(torch.tensor(token_ids, dtype=torch.int32), runner.device)
            logits: Tensor = runner.model.compute_logits(runner.model(input_ids=ids, positions=positions))
        return logits


def _chain(scheduled: Sequence[int]) -> list[int]:
    """Without padding."""
    return [token for token in scheduled if token >= 0]

"""What runs in vLLM's workers: a sampler of ours turns logits into tokens, and logprobs of prompts are ours.

Knows vLLM's model runner V1; does not know the scheduler.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from specdec.core.rounds import Logprobs
from specdec.sampling.grammar import Budget, Grammars
from specdec.sampling.logprobs import logprobs_of
from specdec.vllm.passes import PromptLogprobsRequest, Sampled, WorkerJob, WorkerSampler, sampled_by
from specdec.vllm.worker_drafts import FurtherDrafts, SelfDrafts

MAX_PROMPT_LOGITS = 64
"""Rows of a prompt at a time of which logits are computed: such a row is as long as the vocabulary."""


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    model_runner: Any

    def install_sampler(self, path: str, vocab_size: int, grammars: tuple[str, int, tuple[int, ...]] | None) -> None:
        module, _, name = path.partition(":")
        new_sampler = getattr(importlib.import_module(module), name)
        # Workers that share a model must agree. So the time of a grammar is limited in one of them: the one that vLLM
        # reads, and its error ends the sequence in all.
        budget = None if get_tp_group().is_first_rank else Budget(math.inf, math.inf)
        sampler = new_sampler(
            self.model_runner.device, None if grammars is None else Grammars(*grammars, budget=budget)
        )
        sampling = _Sampling(self.model_runner, sampler, vocab_size)
        sampling.install()
        drafts = SelfDrafts if isinstance(self.model_runner.drafter, SpecDecodeBaseProposer) else FurtherDrafts
        drafts(self.model_runner, sampler, sampling.passed, vocab_size=vocab_size).install()

    def load_adapter(self, adapter: LoRARequest) -> None:
        """Raises ValueError if it changes modules that are not the model's, which vLLM would leave out."""
        self.model_runner.add_lora(adapter)
        manager = self.model_runner.lora_manager._adapter_manager
        changed = manager.list_adapters()[adapter.lora_int_id].loras
        missing = [name for name in changed if name not in manager.modules and ".experts" not in name]
        if get_pp_group().world_size == 1 and (missing or not changed):  # else other workers may have them
            raise ValueError(f"adapter {adapter.lora_name} is of another model: {missing[:1] or 'it changes nothing'}")


class _Sampling:
    """Replaces the sampling of one worker's model runner."""

    def __init__(self, runner: Any, sampler: WorkerSampler, vocab_size: int) -> None:
        self._runner, self._sampler, self._vocab_size = runner, sampler, vocab_size
        self._prompts = _PromptLogprobs(runner, vocab_size)
        self._execute, self._finish = runner.execute_model, runner.sample_tokens
        self._output: Any = None  # of the scheduler
        self._extras: dict[str, Any] = {}
        self.passed: dict[str, tuple[WorkerJob, Sampled]] = {}  # of the texts that the last pass has sampled

    def install(self) -> None:
        self._runner.execute_model, self._runner._sample = self.execute, self.sample
        self._runner.sample_tokens, self._runner._get_prompt_logprobs_dict = self.finish, self._prompts.compute

    def execute(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._output = scheduler_output
        for key in scheduler_output.finished_req_ids:
            self._sampler.forget(key)
            self._prompts.forget(key)
        return self._execute(scheduler_output, *args, **kwargs)

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        self._extras = {}
        output = self._finish(*args, **kwargs)
        if output is not None:
            output.extras, output.prompt_logprobs = self._extras, self._prompts.take_complete()
        return output

    def sample(self, logits: Tensor, _: Any) -> SamplerOutput:
        """``logits`` [rows, vocab]: of the last token and of each draft token of every sequence in the batch."""
        keys: list[str] = self._runner.input_batch.req_ids
        chains: Mapping[str, Sequence[int]] = self._output.scheduled_spec_decode_tokens
        continues = self._runner.discard_request_mask.np  # a prompt, in the next pass
        logits = logits[:, : self._vocab_size]
        sound: list[bool] = logits.amax(-1).isfinite().tolist()  # of each row; NaN is the largest
        jobs, start = {}, 0
        for index, key in enumerate(keys):
            scheduled = chains.get(key, ())
            # vLLM pads a sequence that begins with one row: a chain of -1, which is not the caller's.
            chain = [token for token in scheduled if token >= 0]
            rows = slice(start, start + 1 + len(chain))
            start += 1 + len(scheduled)
            if not continues[index]:
                jobs[index] = self._job(key, chain, logits=logits[rows], sound=all(sound[rows]))
        sampled = dict(zip(jobs, sampled_by(self._sampler, list(jobs.values())), strict=True))
        # At least two columns, or vLLM takes a filler for a token.
        width = max([2, *(len(result.tokens) for result in sampled.values())])
        tokens = [[-1] * width for _ in keys]
        for index, result in sampled.items():
            tokens[index][: len(result.tokens)] = result.tokens
        self.passed.clear()
        self.passed.update({job.key: (job, sampled[index]) for index, job in jobs.items()})
        self._extras = {keys[index]: result.extra for index, result in sampled.items() if result.extra is not None}
        token_ids = torch.tensor(tokens, dtype=torch.int32, device=logits.device)
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=None)

    def _job(self, key: str, chain: Sequence[int], *, logits: Tensor, sound: bool) -> WorkerJob:
        state = self._runner.requests[key]

        def ids(start: int) -> list[int]:
            num_prompt, output = state.num_prompt_tokens, state.output_token_ids
            return output[start - num_prompt :] if start >= num_prompt else [*state.prompt_token_ids[start:], *output]

        return WorkerJob(
            key=key,
            payload=state.sampling_params.extra_args["payload"],
            extra=self._output.extras.get(key),
            num_ids=state.num_tokens,
            ids=ids,
            chain=chain,
            logits=logits,
            sound=sound,
        )


class _PromptLogprobs:
    """Replaces the logprobs of prompts of one worker's model runner: vLLM orders equal ones differently."""

    def __init__(self, runner: Any, vocab_size: int) -> None:
        self._runner, self._vocab_size = runner, vocab_size
        self._parts: dict[str, list[Logprobs]] = {}  # of prompts that have not ended
        self._complete: dict[str, Logprobs] = {}

    def forget(self, key: str) -> None:
        self._parts.pop(key, None)

    def take_complete(self) -> dict[str, Logprobs]:
        """Those of the prompts that ended since the last call."""
        complete, self._complete = self._complete, {}
        return complete

    def compute(self, hidden_states: Tensor, num_scheduled: Mapping[str, int]) -> dict[str, None]:
        """``hidden_states`` [rows, hidden]: of the pass. For vLLM there are none."""
        runner = self._runner
        for key in [key for key in runner.num_prompt_logprobs if key in num_scheduled]:
            state = runner.requests[key]
            start, stop = state.num_computed_tokens, state.num_computed_tokens + num_scheduled[key]
            if not start:
                self._parts[key] = []  # also of a prompt that vLLM begins again
            first_row = runner.query_start_loc.np[runner.input_batch.req_id_to_index[key]].item() - start
            request: PromptLogprobsRequest = state.sampling_params.extra_args["prompt_logprobs"]
            for begin in range(start, min(stop, request.num_tokens - 1), MAX_PROMPT_LOGITS):
                end = min(begin + MAX_PROMPT_LOGITS, stop, request.num_tokens - 1)
                logits = runner.model.compute_logits(hidden_states[first_row + begin : first_row + end])
                tokens = state.prompt_token_ids[begin + 1 : end + 1]
                self._parts[key] += logprobs_of(
                    [logits[:, : self._vocab_size]], [tokens], [request.num_top], logits_per_call=logits.numel()
                )
            if stop >= len(state.prompt_token_ids):
                del runner.num_prompt_logprobs[key]
                if parts := self._parts.pop(key):
                    self._complete[key] = Logprobs.joined(parts)
        return {}

"""One pass of vLLM at a time, over the sequences that the caller names, each with a chain of draft tokens.

What touches vLLM's private parts is here, in worker.py and in worker_drafts.py, written for one minor version of vLLM.
Three seams are vLLM's own: the class of the scheduler, the extension of its workers, and the proposer of draft tokens.
Preemption, paging, prefix caching and chunked prefill are vLLM's.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.request import Request

from specdec.core.rounds import Logprobs
from specdec.sampling.grammar import Grammars
from specdec.vllm.passes import Outcome, PromptLogprobsRequest, Proposer, num_kept


class VllmEngine:
    """Owned by one thread."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        sampler: str,
        max_chain: int,
        vocab_size: int,
        num_slots: int,
        lost: Callable[[], None],
        grammars: Grammars | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """``arguments``: of vllm.EngineArgs. ``sampler``: module and name of a WorkerSampler, ``a.b:C``. ``max_chain``:
        draft tokens of one sequence in a pass at most. ``num_slots``: tokens of the KV cache; 0: as many as fit.
        ``lost`` is called, in any thread, when a worker has died. ``proposer``: what the model drafts with by itself;
        the sampler is a DraftingSampler then. Raises whatever vLLM raises for what it refuses."""
        config = _config(arguments, max_chain, num_slots, proposer)
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False, executor_fail_callback=lost)
        self._core.collective_rpc("install_sampler", args=(sampler, vocab_size, grammars and grammars.origin))
        self.grammars, self.proposer = grammars, proposer
        self._numbers = itertools.count()
        self._adapters: dict[str, LoRARequest] = {}
        self._max_sequences: int = config.scheduler_config.max_num_seqs
        self.max_chain = max_chain
        self.block_size: int = config.cache_config.block_size
        self.context_length: int = config.model_config.max_model_len

    @property
    def _scheduler(self) -> PassScheduler:
        scheduler: PassScheduler = self._core.scheduler
        return scheduler

    def load_adapters(self, directories: Mapping[str, str]) -> None:
        """Load LoRA adapters, by name, for ``add``. Raises whatever vLLM raises for what it refuses."""
        for number, (name, directory) in enumerate(directories.items(), 1):
            self._adapters[name] = adapter = LoRARequest(name, number, lora_path=str(Path(directory).resolve()))
            self._core.collective_rpc("load_adapter", args=(adapter,))

    def add(
        self,
        ids: Sequence[int],
        salt: bytes,
        payload: Any,
        *,
        prompt_logprobs: PromptLogprobsRequest | None = None,
        adapter: str = "",
    ) -> str:
        """Add a sequence with its committed ``ids``, which are the prompt for vLLM. Returns its key. It takes no KV
        blocks yet. ``payload`` can be pickled. With ``prompt_logprobs`` nothing that is cached is used for it.
        ``adapter``: a loaded one; empty: none."""
        key = str(next(self._numbers))
        request = EngineCoreRequest(
            request_id=key,
            prompt_token_ids=list(ids),
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0.0,
                max_tokens=max(1, self.context_length - len(ids)),
                ignore_eos=True,
                detokenize=False,
                prompt_logprobs=prompt_logprobs and prompt_logprobs.num_top,
                extra_args={"payload": payload, "prompt_logprobs": prompt_logprobs},
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapters[adapter] if adapter else None,
            cache_salt=salt.hex() or None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))
        return key

    def follow(self, key: str, num_known: int, tail: Sequence[int], num_committed: int) -> list[int] | None:
        """Take back what the sequence has beyond ``tail``, which its text must have from ``num_known`` on (it agrees
        before). ``num_committed`` ids of the text will not be taken back, and are cached for others. Returns what it
        lacks: the chain of its next passes, which its sampler must accept; None: it was removed, because its text had
        filled the context."""
        if key not in self._scheduler.requests:
            return None
        return self._scheduler.follow(key, num_known, tail, num_committed=num_committed)

    def remove(self, key: str) -> None:
        self._core.abort_requests([key])

    def run(
        self, chains: Mapping[str, Sequence[int]], extras: Mapping[str, Any], num_drafts: int | None = None
    ) -> tuple[dict[str, Outcome], int]:
        """One pass over these sequences, memory first to the first. ``extras``: more that the sampler must know of a
        chain. ``num_drafts``: tokens that the model, or its proposer, drafts after each text; 0: the proposer only
        takes the pass in; None: it does not even do that, and drafts worse later. Returns what came of each, and the
        number of rows."""
        torch.get_num_threads()  # tells OpenMP in this thread, which vLLM's kernels ask by themselves
        chosen = dict(itertools.islice(chains.items(), self._max_sequences))
        self._scheduler.begin(chosen, extras, num_drafts=num_drafts)
        parts, _ = self._core.step()  # post_step would fetch the draft tokens by a message of its own
        outputs = {output.request_id: output for part in parts.values() for output in part.outputs}
        scheduled = self._scheduler.num_scheduled
        return {key: self._outcome(key, outputs.get(key), scheduled) for key in chains}, sum(scheduled.values())

    def _outcome(self, key: str, output: EngineCoreOutput | None, scheduled: Mapping[str, int]) -> Outcome:
        if output is not None:
            prefill = output.prefill_stats  # of the first output alone
            return Outcome(
                tuple(output.new_token_ids),
                self._scheduler.results.get(key),
                num_cached_tokens=0 if prefill is None else prefill.num_cached_tokens,
                prompt_logprobs=self._scheduler.prompt_logprobs.get(key),
                draft=tuple(self._scheduler.drafts.get(key, ())),
            )
        request = self._scheduler.requests.get(key)
        if request is None:
            return Outcome(())
        if key in scheduled:  # a part of its prompt, or its logits were not finite, or it has an error
            continues = request.num_computed_tokens < request.num_tokens
            return Outcome(None if continues else (), self._scheduler.results.get(key))
        # A sequence that would be padded is left out where its padding finds no room.
        full = sum(scheduled.values()) + self.max_chain >= self._scheduler.max_num_scheduled_tokens
        return Outcome(no_memory=not full and len(scheduled) < self._max_sequences)

    def cache_use(self) -> tuple[int, int]:
        """KV slots used, and in total."""
        pool = self._scheduler.kv_cache_manager.block_pool
        total = pool.num_gpu_blocks - 1  # one block is never given out
        return (total - pool.get_num_free_blocks()) * self.block_size, total * self.block_size

    @property
    def drafting_s(self) -> float:
        """The part of the last pass in which the model drafted."""
        return self._scheduler.drafting_s

    @property
    def num_sequences(self) -> int:
        """Sequences that vLLM knows."""
        return len(self._scheduler.requests)

    def shut_down(self) -> None:
        self._core.shutdown()


def device_type() -> str:
    """The kind of device that vLLM runs on, as torch calls it."""
    return str(current_platform.device_type)


def lend_workers(
    arguments: Mapping[str, Any], max_chain: int, num_slots: int, proposer: Proposer | None = None
) -> None:
    """Run the workers of a node that lends them to the first one (vLLM's node_rank > 0) until they or that node end.
    The arguments are those of the first node's VllmEngine, but for the rank."""
    config = _config(arguments, max_chain, num_slots, proposer)
    executor = MultiprocExecutor(config, monitor_workers=False)
    first = (config.parallel_config.master_addr, config.parallel_config.master_port)
    threading.Thread(target=_outlive, args=(first, executor.shutdown), daemon=True).start()
    executor.start_worker_monitor(inline=True)


def _outlive(address: tuple[str, int], then: Callable[[], None]) -> None:
    """Call ``then`` when the other side of a connection has ended: workers that wait for a message would not notice."""
    with socket.create_connection(address) as connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.recv(1)
    then()


def _config(arguments: Mapping[str, Any], max_chain: int, num_slots: int, proposer: Proposer | None) -> VllmConfig:
    """See VllmEngine."""
    config = EngineArgs(
        **arguments,
        async_scheduling=False,
        scheduler_cls=f"{__name__}.PassScheduler",
        worker_extension_cls="specdec.vllm.worker.WorkerExtension",
        speculative_config={
            **({"method": "custom_class", "model": f"{__name__}.NoProposals"} if proposer is None else proposer.words),
            "num_speculative_tokens": max_chain,
        },
    ).create_engine_config()
    if config.use_v2_model_runner:
        raise ValueError("vLLM's model runner V2 takes no proposer from outside: set VLLM_USE_V2_MODEL_RUNNER=0")
    if config.model_config.is_hybrid or config.model_config.is_attention_free:
        raise ValueError(
            "engine vllm serves no model with a recurrent state (Mamba, linear attention): vLLM's model runner V1 keeps"
            " it for sequences of every pass alone, and draft tokens could not be taken back"
        )
    if num_slots:
        config.cache_config.num_gpu_blocks_override = 1 - (-num_slots // config.cache_config.block_size)
    return config


class NoProposals:
    """The proposer of a model that does not draft by itself: draft tokens come from outside."""

    def __init__(self, vllm_config: object) -> None:
        pass

    def load_model(self, *_: Any, **__: Any) -> None:
        pass

    def propose(self, sampled_token_ids: Sequence[Any], *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class PassScheduler(Scheduler):
    """Schedules the sequences of the present pass alone, each with its chain. The others keep their blocks."""

    _chains: Mapping[str, Sequence[int]] = {}
    _extras: Mapping[str, Any] = {}
    _num_drafts: int | None = None
    num_scheduled: Mapping[str, int] = {}
    """Rows of the last pass by sequence."""
    results: Mapping[str, Any] = {}
    """The samplers' extras of the last pass by sequence."""
    prompt_logprobs: Mapping[str, Logprobs] = {}
    """Of the prompts that ended in the last pass."""
    drafts: Mapping[str, Sequence[int]] = {}
    """What the model drafted in the last pass by sequence."""
    drafting_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        coordinator = self.kv_cache_manager.coordinator
        cache = coordinator.cache_blocks

        def cache_committed(request: Any, num_tokens: int) -> None:
            """A block with draft tokens may be written again, and would be found under its first text."""
            cache(request, min(num_tokens, getattr(request, "num_committed", num_tokens)))

        coordinator.cache_blocks = cache_committed

    def begin(self, chains: Mapping[str, Sequence[int]], extras: Mapping[str, Any], num_drafts: int | None) -> None:
        """Name the sequences of the next pass."""
        self._chains, self._extras, self._num_drafts = chains, extras, num_drafts
        # Slots after each text for what is drafted there. More are kept than some passes need.
        self.num_lookahead_tokens: int = max(self.num_lookahead_tokens, num_drafts or 0)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        running: dict[str, Request] = {request.request_id: request for request in self.running}
        absent = [request for key, request in running.items() if key not in self._chains]
        waiting = [request for request in self.waiting if request.request_id not in self._chains]
        # Texts before prompts, which could take all rows of the pass.
        chosen = [running[key] for key in self._chains if key in running]
        self.running: list[Request] = sorted(chosen, key=lambda request: not _decodes(request))
        self.waiting.remove_requests(waiting)
        for request in self.running:
            request.spec_token_ids = list(self._chains[request.request_id]) if _decodes(request) else []
        try:
            output: SchedulerOutput = super().schedule(*args, **kwargs)
        finally:
            self.running += absent
            for request in waiting:
                self.waiting.add_request(request)
        self.num_scheduled = dict(output.num_scheduled_tokens)
        output.extras, output.num_drafts = self._extras, self._num_drafts  # travel to the workers with the rest
        output.num_spec_tokens_to_schedule = self._num_drafts or 0
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.results = getattr(model_runner_output, "extras", {})
        self.prompt_logprobs = getattr(model_runner_output, "prompt_logprobs", {})
        self.drafts = getattr(model_runner_output, "drafts", {})
        self.drafting_s = getattr(model_runner_output, "drafting_s", 0.0)
        return super().update_from_output(scheduler_output, model_runner_output)

    def follow(self, key: str, num_known: int, tail: Sequence[int], *, num_committed: int) -> list[int]:
        """See VllmEngine."""
        request = self.requests[key]
        num_prompt = request.num_prompt_tokens
        kept = num_known + num_kept(request._all_token_ids[num_known:], tail, minimum=num_prompt - num_known)
        del request._all_token_ids[kept:], request._output_token_ids[kept - num_prompt :]
        del request.block_hashes[kept // self.hash_block_size :]
        request.num_computed_tokens = min(request.num_computed_tokens, kept - 1)
        request.num_committed = num_committed
        return list(tail[kept - num_known :])


def _decodes(request: Request) -> bool:
    """Whether all of its text but the last token is computed."""
    return bool(request.num_computed_tokens == request.num_tokens - 1)

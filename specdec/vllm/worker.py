"""What a worker of ours is with either model runner of vLLM: its sampler, and the logprobs of prompts.

Knows no model runner (worker_v1.py, worker_v2.py) and no scheduler.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

from specdec.core.rounds import Logprobs
from specdec.sampling.grammar import Budget, Grammars
from specdec.sampling.logprobs import logprobs_of
from specdec.vllm.passes import PromptLogprobsRequest

MAX_PROMPT_LOGITS = 64
"""Rows of a prompt at a time of which logits are computed: such a row is as long as the vocabulary."""

Origin = tuple[str, int, tuple[int, ...]]
"""Of Grammars: what makes the same ones in a worker."""


def new_sampler(path: str, device: torch.device, grammars: Origin | None) -> Any:
    """A WorkerSampler, or of a model that drafts by itself a DraftingSampler. ``path``: module and name of its class,
    ``a.b:C``."""
    module, _, name = path.partition(":")
    # Workers that share a model must agree. So the time of a grammar is limited in one of them: the one that vLLM
    # reads, and its error ends the sequence in all.
    budget = None if get_tp_group().is_first_rank else Budget(math.inf, math.inf)
    new = getattr(importlib.import_module(module), name)
    return new(device, None if grammars is None else Grammars(*grammars, budget=budget))


class PromptLogprobs:
    """In place of those of a model runner: vLLM orders equal ones differently."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        self._compute_logits, self._vocab_size = compute_logits, vocab_size
        self._parts: dict[str, list[Logprobs]] = {}  # of prompts that have not ended
        self._complete: dict[str, Logprobs] = {}

    def forget(self, key: str) -> None:
        self._parts.pop(key, None)

    def take_complete(self) -> dict[str, Logprobs]:
        """Those of the prompts that ended since the last call."""
        complete, self._complete = self._complete, {}
        return complete

    def add(
        self, key: str, request: PromptLogprobsRequest, ids: Sequence[int], *, start: int, hidden_states: Tensor
    ) -> bool:
        """Take in a part of the prompt ``ids``: from ``start`` on, ``hidden_states`` [rows, hidden]. Returns whether
        it was the last one."""
        if not start:
            self._parts[key] = []  # also of a prompt that vLLM begins again
        stop = start + len(hidden_states)
        for begin in range(start, min(stop, request.num_tokens - 1), MAX_PROMPT_LOGITS):
            end = min(begin + MAX_PROMPT_LOGITS, stop, request.num_tokens - 1)
            logits = self._compute_logits(hidden_states[begin - start : end - start])[:, : self._vocab_size]
            tokens = ids[begin + 1 : end + 1]
            self._parts[key] += logprobs_of([logits], [tokens], [request.num_top], logits_per_call=logits.numel())
        if stop < len(ids):
            return False
        if parts := self._parts.pop(key):
            self._complete[key] = Logprobs.joined(parts)
        return True

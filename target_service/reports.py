"""The logprobs of a pass, of the tasks that ask for them. Does not know the model and its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from specdec.core.device import indices
from specdec.core.rounds import Logprobs
from specdec.sampling.logprobs import logprobs_of
from target_service.tasks import Task
from target_service.verifier import Decision

_Rows = tuple[Tensor, list[int], int]
"""Logits, the token after each row, and how many of the most likely tokens are asked for."""


def output_logprobs(decisions: Mapping[Task, Decision], logits_per_call: int) -> dict[Task, Logprobs]:
    """Those of the accepted tokens and the next one."""
    rows: dict[Task, _Rows] = {}
    for task, decision in decisions.items():
        if (num_top := task.job.open.num_logprobs) is not None:
            logits, nodes = task.tree_outputs.logits, decision.accepted
            tokens = [*(task.tree.token_ids[node] for node in nodes), decision.next_token]
            rows[task] = (logits[indices([0, *(1 + node for node in nodes)], logits.device)], tokens, num_top)
    return _logprobs(rows, logits_per_call)


def prompt_logprobs(tasks: Sequence[Task], logits_per_call: int) -> dict[Task, Logprobs]:
    """Those of the prompt tokens that follow the rows of this pass."""
    rows: dict[Task, _Rows] = {}
    for task in tasks:
        num_context = task.segment.num_context
        if num_rows := min(task.num_text_rows, task.num_prompt_rows(num_context)):
            tokens = list(task.job.ids[num_context + 1 : num_context + 1 + num_rows])
            rows[task] = (task.outputs.logits[:num_rows], tokens, task.job.open.num_prompt_logprobs or 0)
    return _logprobs(rows, logits_per_call)


def _logprobs(rows: Mapping[Task, _Rows], logits_per_call: int) -> dict[Task, Logprobs]:
    if not rows:
        return {}
    logits, tokens, num_top = zip(*rows.values(), strict=True)
    return dict(zip(rows, logprobs_of(logits, tokens, num_top, logits_per_call=logits_per_call), strict=True))

"""The logprobs of a pass, of the jobs that ask for them.

Knows jobs and their outputs; does not know the model and its cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec.core.device import indices
from specdec.core.rounds import Logprobs
from specdec.passes.outputs import RowOutputs
from specdec.passes.rows import Segment
from specdec.sampling.logprobs import logprobs_of
from target_service.job_rows import ends_with_root, prompt_rows
from target_service.verifier import Decision, Job


def output_logprobs(
    jobs: Sequence[Job], outputs: Mapping[int, RowOutputs], decisions: Mapping[int, Decision], logits_per_call: int
) -> dict[int, Logprobs]:
    """Those of the accepted tokens and the next one of each job that asks for them. ``outputs``: of the root and the
    nodes."""
    asking = [index for index in decisions if jobs[index].num_logprobs is not None]
    if not asking:
        return {}
    logits, tokens = [], []
    for index in asking:
        decision, rows = decisions[index], outputs[index].logits
        logits.append(rows[indices([0, *(1 + node for node in decision.accepted)], rows.device)])
        accepted = (jobs[index].tree.token_ids[node] for node in decision.accepted)
        tokens.append([*accepted, decision.next_token])
    tops = [jobs[index].num_logprobs or 0 for index in asking]
    return dict(zip(asking, logprobs_of(logits, tokens, tops, logits_per_call), strict=True))


def prompt_logprobs(
    jobs: Sequence[Job], fed: Mapping[int, Segment], outputs: Mapping[int, RowOutputs], logits_per_call: int
) -> dict[int, Logprobs]:
    """Those of the prompt tokens that follow the rows of this pass, of each job that asks for them."""
    asking = [index for index in fed if prompt_rows(jobs[index], fed[index].num_context)]
    if not asking:
        return {}
    logits, tokens = [], []
    for index in asking:
        job, segment = jobs[index], fed[index]
        num_rows = len(segment.token_ids) - (len(job.tree) if ends_with_root(segment, job) else 0)
        num_rows = min(num_rows, prompt_rows(job, segment.num_context))
        logits.append(outputs[index].logits[:num_rows])
        tokens.append(list(job.ids[segment.num_context + 1 : segment.num_context + 1 + num_rows]))
    tops = [jobs[index].num_prompt_logprobs or 0 for index in asking]
    return dict(zip(asking, logprobs_of(logits, tokens, tops, logits_per_call), strict=True))

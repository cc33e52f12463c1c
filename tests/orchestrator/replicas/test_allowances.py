"""What a target may send is what it was asked for: the largest answer fits, and nothing more does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.replicas import allowances
from specdec.core.rounds import Logprobs, Round, Verdict
from specdec.core.tree import TokenTree
from specdec.transport.logprobs_wire import write_prompt_logprobs
from specdec.transport.wire import write_verdict

CHAIN, SELF_DRAFT = TokenTree.chain([1, 2, 3, 4]), TokenTree.chain([5, 6, 7])


def logprobs(num_tokens: int, num_top: int) -> Logprobs:
    return Logprobs([-1.0] * num_tokens, [1] * num_tokens * num_top, [-1.0] * num_tokens * num_top)


@pytest.mark.parametrize("num_top", [None, 0, 2])
@pytest.mark.parametrize("drafts_itself", [False, True])
def test_a_round_allows_its_largest_verdicts_exactly(num_top: int | None, drafts_itself: bool) -> None:
    tree, num_nodes = (TokenTree(), len(SELF_DRAFT)) if drafts_itself else (CHAIN, 0)
    round_ = Round(1, 9, tree, num_autonomous=2, self_draft_nodes=num_nodes)
    size = 0
    for number in range(3):
        accepted = (0, 1, 2) if drafts_itself else (0, 1, 2, 3) if not number else ()
        verdict = Verdict(1, 9, accepted, 8, self_draft=SELF_DRAFT if drafts_itself else TokenTree())
        if num_top is not None:
            verdict = replace(verdict, logprobs=logprobs(1 + len(accepted), num_top))
        size += allowances.size_of_verdict(write_verdict(7, verdict))
    assert allowances.of_round(round_, num_top) == size


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("num_tokens", [2, 300, 20_000])
def test_an_open_allows_the_logprobs_of_its_prompt_and_hardly_more(num_top: int, num_tokens: int) -> None:
    verdict = Verdict(0, num_tokens, (), 8, prompt_logprobs=logprobs(num_tokens - 1, num_top))
    parts = list(write_prompt_logprobs(7, verdict))
    size = sum(allowances.MESSAGE + allowances.size_of_logprobs(part.logprobs) for part in parts)
    allowed = allowances.of_prompt(num_tokens, num_top)
    assert size <= allowed <= 1.1 * size + 2 * (1 + num_top) + allowances.MESSAGE * (1 + num_tokens // 256)

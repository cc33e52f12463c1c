"""A target that looks up in its own text proposes what followed the last time, and nothing where nothing recurs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specdec.core.rounds import Round, TargetOpen, Verdict
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.server.step_loop import Key
from specdec.speculation.prompt_lookup import HitRates, PromptLookup
from target_service.__main__ import TargetSettings
from target_service.engine import TargetEngine
from target_service.language_model import LmVerifier
from target_service.self_draft.text_lookup import TextLookup, chain_of
from tests.models.fake_peers import hit_rates
from tests.models.table_runner import TableRunner

PAGE = list(range(10, 50))


def spec_of(prompt: list[int]) -> SequenceSpec:
    return SequenceSpec(prompt, len(prompt), SamplingParams(temperature=0.0), 1, Method.COUPLED)


def test_a_proposal_is_made_where_an_n_gram_recurs_and_as_long_as_it_is_likely():
    assert chain_of(PromptLookup(hit_rates(0.95)), PAGE, 8) == EMPTY_TREE
    assert chain_of(PromptLookup(hit_rates(0.95)), PAGE + PAGE[:9], 8) == TokenTree.chain(PAGE[9:17])
    assert chain_of(PromptLookup(hit_rates(0.6)), PAGE + PAGE[:9], 8) == TokenTree.chain(PAGE[9:11])
    assert chain_of(PromptLookup(hit_rates(0.2)), PAGE + PAGE[:9], 8) == EMPTY_TREE
    assert chain_of(PromptLookup(HitRates()), PAGE + PAGE[:2], 8) == EMPTY_TREE, "two tokens agree in many places"


def test_it_drafts_up_to_the_end_of_the_context_while_decoding_goes_on_without_rounds():
    engine, key = TargetEngine(LmVerifier(TableRunner(context_length=60), TextLookup())), Key(1, 1)
    engine.open(key, TargetOpen(spec_of([1, 2, 3]), max_self_draft_nodes=16))
    num_passes = committed = 0
    for _ in range(60):
        for _, verdict in engine.step():
            assert isinstance(verdict, Verdict)
            num_passes, committed = num_passes + 1, committed + len(verdict.accepted) + 1
        if engine.idle and 3 + committed < 60:
            engine.submit(key, Round(1, 3 + committed, num_autonomous=64, self_draft_nodes=16))
    assert committed in (57, 58), "the token after a chain may be beyond the context"
    assert num_passes < 40


def test_texts_with_and_without_lookups_share_their_cached_prompts():
    engine, prompt = TargetEngine(LmVerifier(TableRunner(block_size=4), TextLookup())), [1, 2, 3, 4, 5] * 4
    num_cached = []
    for number, max_nodes in enumerate((0, 8), 1):
        engine.open(Key(1, number), TargetOpen(spec_of(prompt), max_self_draft_nodes=max_nodes))
        [(_, verdict)] = engine.step()
        assert isinstance(verdict, Verdict)
        num_cached.append(verdict.num_cached_tokens)
    assert num_cached == [0, 19]


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_it_is_a_setting_of_both_engines_and_no_second_method_beside_a_head(engine: str):
    assert TargetSettings(model="m", engine=engine, self_draft="lookup").self_draft == "lookup"
    with pytest.raises(ValidationError, match="set one of them"):
        TargetSettings(model="m", engine=engine, self_draft="lookup", head="h")

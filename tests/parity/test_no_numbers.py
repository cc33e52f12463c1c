"""A text for which a model computes NaN ends alone. Neither its neighbours nor the next owner of its memory notice."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

from draft_service.drafter import DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.errors import PassFailed
from specdec.core.rounds import ModelInfo, TargetOpen
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.runner.model_runner import ModelRunner
from target_service.language_model import LmVerifier
from target_service.verifier import Decision, Job
from tests.models.backends import backend

VOCAB, CONTEXT, SPOILT = 48, 128, 7
KINDS = [
    (Method.COUPLED, SamplingParams(0.0)),
    (Method.COUPLED, SamplingParams(0.9, top_k=5, top_p=0.9, min_p=0.01)),
    (Method.TOKEN, SamplingParams(0.9, top_p=0.95)),
    (Method.BLOCK, SamplingParams(1.0)),
]
kinds = pytest.mark.parametrize(("method", "sampling"), KINDS, ids=["greedy", "coupled", "token", "block"])


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    made = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    with torch.no_grad():
        made.get_output_embeddings().weight[SPOILT] = 0.0  # no likelier than the average, so it is seldom said
    return made


def runner(model: torch.nn.Module, value: float, num_slots: int = 256) -> ModelRunner:
    made = copy.deepcopy(model)
    with torch.no_grad():
        made.get_input_embeddings().weight[SPOILT] = value
    return ModelRunner(made, ModelInfo("tiny", "", VOCAB, "", CONTEXT), num_slots, backend())


class Run:
    """A sequence at a target, round after round."""

    def __init__(self, verifier: LmVerifier, ids: list[int], method: Method, sampling: SamplingParams) -> None:
        spec = SequenceSpec(tuple(ids), len(ids), sampling, 5, method)
        self.open, self.state = TargetOpen(spec), verifier.open(spec)
        self.ids, self.tree = list(ids), EMPTY_TREE
        self.error: object = None

    def take(self, outcome: object) -> None:
        if not isinstance(outcome, Decision):
            self.error = outcome
            return
        self.ids += [*(self.tree.token_ids[node] for node in outcome.accepted), outcome.next_token]


def decode(verifier: LmVerifier, runs: list[Run], num_rounds: int = 6) -> None:
    for _ in range(num_rounds):
        going = [run for run in runs if run.error is None]
        outcomes, _ = verifier.verify([Job(run.open, run.state, run.ids, run.tree) for run in going])
        for run, outcome in zip(going, outcomes, strict=True):
            run.take(outcome)
            if run.error is not None:
                verifier.close(run.state)


SOUND = [[1, 2, 3], [9, 8, 5, 6, 4, 3, 2, 1, 40, 41, 42, 43, 44, 45, 46, 30, 31, 32]]


@kinds
@pytest.mark.parametrize(("value", "place"), [(torch.nan, 0), (torch.inf, 5), (-torch.inf, 18)], ids=str)
def test_a_text_without_numbers_ends_alone(model, method, sampling, value, place) -> None:
    alone = []
    for ids in SOUND:
        verifier = LmVerifier(runner(model, value))
        alone.append(Run(verifier, ids, method, sampling))
        decode(verifier, [alone[-1]])
    verifier = LmVerifier(shared := runner(model, value, num_slots=96))
    # First, so that it has block 0, which is read, hidden, for texts with too few blocks of their own.
    guilty = Run(verifier, [*range(10, 10 + place), SPOILT, *range(30, 48 - place)], method, sampling)
    runs = [guilty, *(Run(verifier, ids, method, sampling) for ids in SOUND)]
    decode(verifier, runs)
    assert type(guilty.error) is PassFailed
    assert "NaN" in str(guilty.error)
    assert [run.ids for run in runs[1:]] == [run.ids for run in alone]
    # And again in the memory that it left behind.
    for run in runs[1:]:
        verifier.close(run.state)
    shared.pool.forget()
    runs = [Run(verifier, ids, method, sampling) for ids in SOUND]
    decode(verifier, runs)
    assert [run.ids for run in runs] == [run.ids for run in alone]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf], ids=str)
@pytest.mark.parametrize(("method", "sampling"), KINDS[:2], ids=["greedy", "coupled"])
def test_a_draft_token_without_numbers_that_is_not_accepted_does_no_harm(model, method, sampling, value) -> None:
    texts = []
    for tree in (EMPTY_TREE, TokenTree((SPOILT, 4, 5), (-1, 0, -1))):
        verifier = LmVerifier(runner(model, value))
        run = Run(verifier, SOUND[0], method, sampling)
        decode(verifier, [run], 1)
        run.tree = tree
        decode(verifier, [run], 1)
        run.tree = EMPTY_TREE
        decode(verifier, [run], 5)
        assert run.error is None
        texts.append(run.ids)
    assert texts[1][: len(texts[0])] == texts[0]


@kinds
def test_a_draft_without_numbers_proposes_nothing_that_cannot_be_sent(model, method, sampling) -> None:
    drafter = LanguageModelDrafter(runner(model, torch.nan))

    def opened(ids: list[int]) -> DraftSequence:
        spec = SequenceSpec(tuple(ids), len(ids), sampling, 5, method)
        return DraftSequence(spec, list(ids), state=drafter.open(spec))

    [expected] = drafter.grow([opened(SOUND[0])])
    spoilt, beside = drafter.grow([opened([1, 2, SPOILT]), opened(SOUND[0])])
    assert beside == expected
    assert all(0 <= node.token_id < VOCAB for node in spoilt)
    if method is not Method.COUPLED:
        assert spoilt == []

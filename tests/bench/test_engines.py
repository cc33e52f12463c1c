"""The parts of bench engines that need no vLLM: contenders, and what counts as a near tie."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

from bench.engines.__main__ import main
from bench.engines.comparisons import comparisons_of, of_running, of_services, started
from bench.engines.in_vllm import run_in_window
from bench.engines.parity import Divergence, Parity, Reference, compare_texts, first_difference
from bench.harness.command import Common
from bench.harness.models import Models
from bench.harness.runner import Answer, Ask, Request, Run, Window
from bench.models.damped_pair import Pair
from specdec.core.noise import Domain, Key, exponentials
from tests.checkout import DEMO

PROMPT = tuple(range(5, 25))


def test_an_environment_without_vllm_is_told_in_a_sentence_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr("bench.engines.__main__.find_spec", lambda name: None)
    with pytest.raises(typer.Exit) as ended:
        main(Common())
    assert ended.value.exit_code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "needs vLLM in the environment" in line


def test_services_on_torch_must_give_the_text_of_their_target_alone():
    class Endpoint:
        def asks(self, **fields):
            return fields

    with_draft, without = (of_services(Endpoint(), Endpoint(), number, True) for number in (4, None))
    assert [(each.name, each.ask, each.same_as) for each in with_draft] == [
        ("target alone", {"num_draft_tokens": 0}, ""),
        ("K = 4", {"num_draft_tokens": 4}, "target alone"),
        ("adaptive", {}, "target alone"),
    ]
    assert [each.name for each in without] == ["target alone", "adaptive"]
    assert not any(each.same_as for each in of_services(Endpoint(), Endpoint(), 4, False))


def test_each_engine_is_compared_by_method_and_a_draft_also_runs_in_the_process_of_the_target():
    models = Models("", "target", ("draft", "other"), ("head",))
    comparisons = comparisons_of(models, ["vllm", "torch-d"])
    assert {each.name: (each.method.target, each.method.draft, each.in_vllm) for each in comparisons} == {
        "vllm-lookup": ("", "", "alone"),
        "vllm-ngram": ("", "", "ngram"),
        "vllm-draft": ("", "draft", "draft_model"),
        "vllm-head": ("--head=head", "", ""),
        "torch-draft": ("", "draft", "draft_model"),
        "vllm-inner-draft": ("--head=draft", "", "draft_model"),
    }
    with pytest.raises(ValueError, match="no comparison begins with else, but there are vllm-lookup, "):
        comparisons_of(models, ["else"])


async def test_a_running_deployment_is_measured_next_to_vllm_by_itself(monkeypatch):
    class InVllm:
        def __init__(self, target, draft, how, *_):
            self.model = (target, draft, how)

        @asynccontextmanager
        async def running(self):
            yield self.model

    monkeypatch.setattr("bench.engines.comparisons.InVllm", InVllm)
    common, models = Common(address="127.0.0.1:1"), Models("", str(DEMO / "target"))
    async with started(of_running(), models, common, 4) as contenders:
        assert [each.name for each in contenders] == ["target alone", "K = 4", "adaptive", "vLLM alone"]
        assert contenders[-1].ask == (str(DEMO / "target"), "", "alone")


def test_vllm_has_as_many_live_requests_as_the_window_and_its_texts_end_before_an_end_token(monkeypatch):
    """A text has two tokens and the end token 0, if it is not shorter by its limit."""

    class Engine:
        def __init__(self):
            self.live, self.num_live, self.aborted = {}, [], []

        def add_request(self, name, prompt, params):
            self.live[name] = ([*prompt["prompt_token_ids"], 7, 0][: params["max_tokens"]], [])

        def step(self):
            self.num_live.append(len(self.live))
            for name, (text, ids) in list(self.live.items()):
                ids.append(text[len(ids)])
                if finished := ids == text:
                    del self.live[name]
                yield SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=ids)], finished=finished)

        def abort_request(self, names):
            self.aborted += names

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    engine = Engine()
    prompts = [{"token_ids": {"token_ids": [index]}} for index in range(1, 9)]
    run = run_in_window(engine, Request(prompts, 4, 0.0, 1, "", Window(2, 7)), end_token_ids=(0,))
    assert [(answer.token_ids, answer.is_cut) for answer in run.answers] == [
        ([1, 7], False),
        ([2, 7], False),
        ([3, 7], True),
        ([4], True),
    ]
    assert (set(engine.num_live), engine.aborted) == ({2}, ["2", "3"])


@pytest.fixture(scope="module")
def reference(small_pair: Pair) -> Reference:
    return Reference(str(small_pair.target))


@pytest.fixture(params=[0.0, 1.0])
def request_(request: pytest.FixtureRequest) -> Request:
    return Request([{"token_ids": {"token_ids": PROMPT}}], 3, request.param, 3, "")


def test_a_gap_is_how_far_the_worst_token_is_from_the_one_that_the_target_takes(reference, request_, small_pair):
    model = AutoModelForCausalLM.from_pretrained(small_pair.target, dtype=torch.float32)
    with torch.inference_mode():
        scores = model(torch.tensor([[*PROMPT, 7, 8]])).logits[0, -1].double()
    if request_.temperature:
        scores = scores - exponentials([Key(3, 22)], Domain.COUPLED, len(scores))[0].log()
    best, second, third = scores.topk(3).indices.tolist()
    gap = float(scores[best] - scores[third])
    assert reference.gap(request_, 0, [7, 8], [best]) == 0.0
    assert reference.gap(request_, 0, [7, 8], [second, third]) == pytest.approx(gap, abs=1e-5)


def test_greedy_texts_are_those_without_a_gap(reference: Reference):
    request = Request([{"token_ids": {"token_ids": PROMPT}}], 3, 0.0, 3, "")
    [text] = reference.greedy(request)
    assert [reference.gap(request, 0, text[:i], [token]) for i, token in enumerate(text)] == [0.0] * 3


async def test_the_first_difference_is_judged_by_the_worse_token(reference: Reference):
    assert first_difference([7, 8], [7, 8]) is None
    assert first_difference([7], [7, 8]) == (1, (None, 8))
    request = Request([{"token_ids": {"token_ids": PROMPT}}], 3, 1.0, 3, "")

    def answers(ids: list[int]) -> Ask:
        async def ask(_: Request) -> Run:
            return Run(1.0, [Answer(ids)])

        return ask

    asks = {"torch": answers([7, 8, 9]), "same": answers([7, 8, 9]), "other": answers([7, 8, 10, 9])}
    compared = await compare_texts(asks, [request], reference)
    assert (compared.num_tokens, compared.num_texts) == (6, 2)
    [divergence] = compared.divergences
    assert (divergence.contender, divergence.other, divergence.position) == ("other", "torch", 2)
    assert divergence.gap == max(reference.gap(request, 0, [7, 8], [token]) for token in (9, 10))


@pytest.mark.parametrize(
    ("gaps", "num_tokens", "holds"),
    [([], 100, True), ([1e-4], 1000, True), ([1e-4], 999, False), ([1e-2], 5000, False), ([1e-4, 1e-4], 1999, False)],
)
def test_only_few_near_ties_may_differ(gaps: list[float], num_tokens: int, holds: bool):
    compared = Parity(num_tokens, 8, [Divergence("x", "torch", 0.0, 0, gap) for gap in gaps])
    assert compared.holds == holds
    assert ("holds" in str(compared)) == holds

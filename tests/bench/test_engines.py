"""The parts of bench engines that need no vLLM: contenders, and what counts as a near tie."""

from __future__ import annotations

from io import BytesIO

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

from bench.engines.__main__ import main, of_services
from bench.engines.generators import Generator
from bench.engines.parity import Divergence, Parity, Reference, compare_texts, first_difference
from bench.harness.command import Common
from bench.harness.runner import Answer, Ask, Request, Run
from bench.models.damped_pair import Pair
from specdec.core.noise import Domain, Key, exponentials

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

    with_draft, without = (of_services("torch services", Endpoint(), number, True) for number in (4, None))
    alone = "torch services, target alone"
    assert [(each.name, each.ask, each.same_as) for each in with_draft] == [
        (alone, {"num_draft_tokens": 0}, ""),
        ("torch services, K = 4", {"num_draft_tokens": 4}, alone),
        ("torch services, adaptive", {}, alone),
    ]
    assert [each.name for each in without] == [alone, "torch services, adaptive"]
    assert not any(each.same_as for each in of_services("vllm services", Endpoint(), 4, False))


async def test_vllm_is_asked_by_lines_and_its_texts_end_before_an_end_token():
    class Process:
        def __init__(self):
            self.stdin = self.stdout = self
            self.written = b""

        def write(self, line):
            self.written += line

        async def readline(self):
            return b'{"seconds": 2.0, "outputs": [[7, 0, 0]]}\n'

    process = Process()
    request = Request([{"token_ids": {"token_ids": [1, 2]}}], 3, 0.0, 1, "")
    run = await Generator(process, BytesIO(), [0]).ask(request)
    assert process.written == b'{"prompts": [[1, 2]], "max_tokens": 3, "end_token_ids": [0]}\n'
    assert (run.seconds, [answer.token_ids for answer in run.answers]) == (2.0, [[7]])


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

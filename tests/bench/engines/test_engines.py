"""The parts of bench engines that need no vLLM: turns, tables, and what counts as a near tie."""

from __future__ import annotations

import pytest
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM

from bench.engines import table
from bench.engines.__main__ import main
from bench.engines.pairs import PairName, find
from bench.engines.parity import Case, Divergence, Parity, Reference, divergences
from bench.engines.turns import Row, take_turns
from bench.models.damped_pair import Pair
from bench.peers.contender import Run
from bench.peers.prompts import PromptSource
from specdec.core.noise import Domain, Key, exponentials

NAMES = ["vLLM generate", "vLLM draft_model", "vLLM ngram"]
NAMES += [f"{engine} services, {how}" for engine in ("torch", "vllm") for how in ("alone", "draft", "adaptive")]


def row(name: str, streams: int, *rates: float) -> Row:
    return Row(name, streams, 1, runs=[Run(1 / rate, [[7]], {"acceptance": 0.5}) for rate in rates])


async def test_contenders_take_turns_on_the_same_prompts_after_one_that_warms_up():
    asked: list[tuple[str, list[list[int]]]] = []

    def contender(name: str):
        async def run(prompts, max_tokens):
            asked.append((name, prompts))
            return Run(1.0, [[max_tokens] if name != "odd" else [0] for _ in prompts])

        return run

    contenders = {name: contender(name) for name in ("first", "even", "odd")}
    shape = dict(streams=2, prompt_tokens=5, max_tokens=3, repeats=2)
    rows = await take_turns(contenders, PromptSource(50), **shape, report=lambda _: None)
    assert [name for name, _ in asked] == ["first", "even", "odd", "even", "odd", "first", "odd", "first", "even"]
    turns = [asked[start : start + 3] for start in (0, 3, 6)]
    assert all(len({str(prompts) for _, prompts in turn}) == 1 for turn in turns)
    assert len({str(turn[0][1]) for turn in turns}) == 3, "no turn finds another's prompts in a cache"
    assert [(each.name, len(each.runs), each.same, each.compared) for each in rows] == [
        ("first", 2, 4, 4),
        ("even", 2, 4, 4),
        ("odd", 2, 0, 4),
    ]


def test_the_table_has_every_contender_and_ratios_are_medians_over_turns():
    rows = [row(name, streams, 10.0 * place, 20.0) for streams in (1, 16) for place, name in enumerate(NAMES, 1)]
    console = Console(width=120, record=True)
    console.print(table.speeds(rows[len(NAMES) :]))
    shown = console.export_text()
    assert all(name in shown for name in NAMES)
    assert "16 requests at a time" in shown
    figures = table.ratios(rows)
    assert figures.keys() == {f"{name}_{streams}" for name in table.RATIOS for streams in (1, 16)}
    assert figures["split_1"] == (7.0 + 1.0) / 2


def test_an_environment_without_vllm_is_told_in_a_sentence_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr("bench.engines.__main__.find_spec", lambda name: None)
    with pytest.raises(typer.Exit) as ended:
        main()
    assert ended.value.exit_code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "needs vLLM in the environment" in line


def test_a_pair_that_was_not_fetched_is_told_with_the_command_that_fetches_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"there is no .*smollm2.*: specdec fetch smollm2 makes it"):
        find(PairName.smollm2, tmp_path)


@pytest.fixture(scope="module")
def reference(small_pair: Pair) -> Reference:
    return Reference(small_pair)


@pytest.fixture(scope="module", params=[0.0, 1.0])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(tuple(range(5, 25)), 3, request.param)


def test_a_gap_is_how_far_the_worst_token_is_from_the_one_that_the_target_takes(reference, case, small_pair):
    model = AutoModelForCausalLM.from_pretrained(small_pair.target, dtype=torch.float32)
    with torch.inference_mode():
        scores = model(torch.tensor([[*case.prompt, 7, 8]])).logits[0, -1].double()
    if case.temperature:
        scores = scores - exponentials([Key(case.seed, 22)], Domain.COUPLED, len(scores))[0].log()
    best, second, third = scores.topk(3).indices.tolist()
    gap = float(scores[best] - scores[third])
    assert reference.gap(case, [7, 8], [best]) == 0.0
    assert reference.gap(case, [7, 8], [second, third]) == pytest.approx(gap, abs=1e-5)


def test_greedy_texts_are_those_without_a_gap(reference: Reference):
    case = Case(tuple(range(5, 25)), 3, 0.0)
    [text] = reference.greedy([case], 3).values()
    assert [reference.gap(case, text[:i], [token]) for i, token in enumerate(text)] == [0.0] * 3


def test_the_first_difference_is_judged_by_the_worse_token(reference: Reference, case: Case):
    expected = [7, 8, 9]
    [found] = divergences("x", {case: expected}, {case: [7, 8, 10, 9]}, reference)
    assert (found.position, found.case) == (2, case)
    assert found.gap == max(reference.gap(case, [7, 8], [token]) for token in (9, 10))
    assert divergences("x", {case: expected}, {case: expected}, reference) == []


@pytest.mark.parametrize(
    ("gaps", "num_tokens", "holds"),
    [([], 100, True), ([1e-4], 1000, True), ([1e-4], 999, False), ([1e-2], 5000, False), ([1e-4, 1e-4], 1999, False)],
)
def test_only_few_near_ties_may_differ(case: Case, gaps: list[float], num_tokens: int, holds: bool):
    found = Parity(num_tokens, 8, 1, 9, 5, [Divergence("x", case, 0, gap) for gap in gaps])
    assert found.holds == holds
    assert ("holds" in str(found)) == holds

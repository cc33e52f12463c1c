"""The contenders of bench peers on a tiny pair: they all generate the same, and all ratios are measured."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from bench.peers.calibration import calibrate
from bench.peers.comparison import Plan, Section, compare
from bench.peers.contender import Settings
from bench.peers.in_process import InProcess
from bench.peers.prompts import PromptSource
from bench.peers.ratios import KEYS, ratios
from bench.peers.services import Services, running
from bench.peers.transformers_peers import TransformersPair
from tests.bench.conftest import SMALL

THREADS = (1,)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(small_pair) -> AsyncIterator[Services]:
    async with running(small_pair, "float32", THREADS) as found:
        yield found


@pytest.mark.slow
async def test_every_contender_in_one_process_generates_what_transformers_does(small_pair):
    prompts = PromptSource(SMALL.vocab_size).take(3, 20)
    theirs = TransformersPair(small_pair, "float32")
    ours = InProcess(small_pair, "float32", (4,))
    generate, assisted = theirs.contenders(1)
    one_thread = Settings((1,))
    expected = [(await generate.run(one_thread, [prompt], 16)).outputs[0] for prompt in prompts]
    assert all(len(output) == 16 for output in expected)
    for contender in theirs.contenders(3):
        run = await contender.run(one_thread, prompts, 16)
        assert run.outputs == expected, contender.name
    for contender in (assisted, *ours.contenders()):
        for prompt, output in zip(prompts, expected, strict=True):
            run = await contender.run(Settings((1,), 4), [prompt], 16)
            assert run.outputs == [output], contender.name
            assert run.tokens_per_s > 0
    assert ours.target_runner.pool.num_used == 0


async def test_assisted_generation_is_given_the_number_of_draft_tokens(small_pair):
    _, assisted = TransformersPair(small_pair, "float32", (1,)).contenders(1)
    settings = await calibrate(assisted, [PromptSource(SMALL.vocab_size).take(1, 8)], 8)
    assert settings.num_draft_tokens in assisted.num_draft_tokens


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_all_ratios_are_measured_with_real_services(small_pair, services):
    plan = Plan(
        sections=tuple(Section),
        streams=(4,),
        repeats=1,
        texts=1,
        single_tokens=16,
        batch_tokens=8,
        few_tokens=8,
        calibration_tokens=8,
        batch_calibration_tokens=4,
        thorough=False,
        learning=1,
        num_compared=2,
        threads=THREADS,
        ahead=(False, True),
    )
    shown: list[str] = []
    result = await compare(
        small_pair,
        "float32",
        services,
        PromptSource(SMALL.vocab_size),
        plan,
        report=lambda text: None,
        show=shown.append,
    )
    figures = ratios(result.rows)
    unmeasured = {key for key in KEYS if "16" in key or "32" in key}
    assert tuple(figures) == tuple(key for key in KEYS if key not in unmeasured)
    assert all(value > 0 for value in figures.values())
    assert 0.6 < result.acceptance < 0.95
    assert len(result.rows) == 6 + 3
    assert all(row.identical == row.compared > 0 for row in result.rows), "float32 has no ties to break"
    assert len(shown) == len(result.rows) + 1
    assert result.as_dict()["contenders"]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_the_second_contender_of_a_prompt_computes_all_of_it(services):
    prompt = list(range(64))
    for settings in (Settings((1, 1)), Settings((1, 1)), Settings((1, 1), 2), Settings((1, 1), 2)):
        sample = await services.answer(settings, prompt, 4)
        assert sample.finish.usage.prompt_tokens == 64
        assert sample.finish.usage.cached_prompt_tokens == 0


async def test_the_loop_in_one_process_computes_all_of_a_prompt(small_pair):
    ours = InProcess(small_pair, "bfloat16", [2], [1])
    forward, rows = ours.target_runner.forward, []

    def counted(segments):
        rows.append(sum(len(each.token_ids) for each in segments))
        return forward(segments)

    ours.target_runner.forward = counted
    for contender in ours.contenders():
        rows.clear()
        await contender.run(Settings((1,), contender.num_draft_tokens[0]), [list(range(64))], 4)
        assert max(rows) >= 64


def test_a_quick_plan_has_fewer_tokens_on_a_slow_machine() -> None:
    quick, full = (Plan.of(quick, 5, None, None, None) for quick in (True, False))
    slow = quick.fitting(7.0)
    for name in ("single_tokens", "calibration_tokens"):
        assert getattr(slow, name) < getattr(quick, name)
    assert quick.fitting(100.0) == quick
    assert full.fitting(1.0) == full
    assert quick.fitting(0.1).batch_calibration_tokens > 0

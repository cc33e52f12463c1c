"""Law: the text is the one that the target alone gives for that seed, whatever is drafted and however much.

At temperature 0 and above, with filters, penalties, bias and min_tokens. Replicas lose sequences on the way, so the
state of a text's transforms is made up again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.errors import Preempted
from specdec.core.sequence import SequenceSpec
from specdec.runner.model_runner import ModelRunner
from testing.misbehaving import MODELS_OWN, Misbehaving
from tests.cluster import cluster
from tests.models.scripted import BranchingDrafter, RandomDrafter, WatchingVerifier
from tests.parity.conftest import Reference
from tests.parity.reference import sample_seed
from tests.parity.target_alone import (
    COUPLED,
    GREEDY,
    NUM_TOKENS,
    OF_GENERATE,
    SETTINGS,
    TRANSFORMED,
    Case,
    TargetAlone,
)

pytestmark = pytest.mark.slow

LENGTHS = (8, 24, 32, 40)
LENGTH = 24
SEEDS = (0, 7, 2**32 + 1, 2**64 - 1)


@pytest.fixture(scope="module")
def alone(reference: Reference, prompts: list[list[int]], near_tie: float) -> TargetAlone:
    """Every setting with two seeds, and greedy texts of several lengths. Half of them are stopped somewhere."""
    greedy = [Case(tuple(prompts[i][: LENGTHS[i % 4]]), 0, 0) for i in range(16)]
    whole = TargetAlone(reference, greedy, near_tie).texts
    stopped = [
        replace(case, stops=(text[(5 + 3 * i) % len(text)],)) if i % 2 else case
        for i, (case, text) in enumerate(whole.items())
    ]
    others = [
        Case(tuple(prompts[(2 * setting + i) % len(prompts)][:LENGTH]), SEEDS[(setting + 2 * i) % 4], setting)
        for setting in range(1, len(SETTINGS))
        for i in range(2)
    ]
    # A transformed text would have this token early.
    early = [replace(case, stops=(case.prompt[-3],)) if case.fields in TRANSFORMED else case for case in others]
    return TargetAlone(reference, [*stopped, *early], near_tie)


def by_spec(alone: TargetAlone) -> Callable[[SequenceSpec], list[int]]:
    """The texts by what a drafter knows of a request."""
    texts = {}
    for case, text in alone.texts.items():
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
        values = dict(zip(names, (1.0, 0, 1.0, 0.0, 1.0, 0.0), strict=True)) | case.fields
        texts[case.prompt, case.seed, *(values[name] for name in names)] = text or [1]

    def continuation(spec: SequenceSpec) -> list[int]:
        params = spec.sampling
        filters = (params.temperature, params.top_k, params.top_p, params.min_p)
        penalties = (params.repetition_penalty, params.presence_penalty)
        return texts[tuple(spec.token_ids[: spec.num_prompt_tokens]), spec.seed, *filters, *penalties]

    return continuation


DRAFTERS: dict[str, tuple[Callable[..., list[Any]], Sequence[int]]] = {
    "none": (lambda *_: [], [0, 4]),
    "demo draft": (lambda target, draft, alone: [LanguageModelDrafter(draft)], range(9)),
    "random tokens": (lambda target, draft, alone: [RandomDrafter(target.info)], [3, 5]),
    "branching trees": (lambda target, draft, alone: [BranchingDrafter(target.info, by_spec(alone))], [4, 8, 20]),
}


@pytest.mark.parametrize("kind", DRAFTERS)
async def test_the_text_does_not_depend_on_the_draft(
    target_runner: ModelRunner, draft_runner: ModelRunner, alone: TargetAlone, device: str, kind: str
) -> None:
    make, nums_draft_tokens = DRAFTERS[kind]
    watching = WatchingVerifier(target_runner)
    verifier, chance = Misbehaving(watching), random.Random(4)
    verifier.instead = lambda _: Preempted("planted") if chance.random() < 0.02 else MODELS_OWN
    async with cluster([verifier], make(target_runner, draft_runner, alone)) as deployment:
        # In another order each time, and so in other company.
        order = random.Random(kind).sample(list(alone.texts), len(alone.texts))
        outputs = await asyncio.gather(
            *(
                case.generate(deployment.client, nums_draft_tokens[i % len(nums_draft_tokens)])
                for i, case in enumerate(order)
            )
        )
        await deployment.settled(30.0)
    samples = {case: sample for case, [sample] in zip(order, outputs, strict=True)}
    divergences = sum(alone.diverges(case, sample.token_ids) for case, sample in samples.items())
    num_replays = sum(sample.finish.speculation.num_replays for sample in samples.values())
    print(f"{len(samples)} texts, {divergences} divergences at near ties, {num_replays} replays; {watching}")
    assert divergences <= (1 if device == "cpu" else len(samples) // 10)
    assert num_replays > 0
    assert len({tuple(sample.token_ids) for sample in samples.values()}) > len(samples) // 2
    if kind == "none":
        assert watching.num_trees == 0
    if kind == "demo draft":
        assert watching.num_accepted > len(samples)
    if kind == "branching trees":
        assert watching.num_branching_trees > 100
        assert watching.num_accepted_deep_late_siblings > 30


async def test_sample_i_is_what_its_own_seed_gives(
    target_runner: ModelRunner, draft_runner: ModelRunner, alone: TargetAlone
) -> None:
    async with cluster([WatchingVerifier(target_runner)], [LanguageModelDrafter(draft_runner)]) as deployment:
        for case in [case for case in alone.texts if case.fields in (COUPLED[0], COUPLED[6])][::2]:
            together = await case.generate(deployment.client, 4, n=3)
            assert len({tuple(sample.token_ids) for sample in together}) == 3
            own = [replace(case, seed=sample_seed(case.seed, index)) for index in range(3)]
            singles = await asyncio.gather(
                *(each.generate(deployment.client, 2 * index) for index, each in enumerate(own))
            )
            assert [sample.token_ids for [sample] in singles] == [sample.token_ids for sample in together]
        await deployment.settled(30.0)


def test_the_reference_gives_the_greedy_texts_of_transformers_generate(
    reference: Reference, prompts: list[list[int]], near_tie: float
) -> None:
    chosen = [prompt[:LENGTH] for prompt in prompts[20:32]]
    plain = reference.greedy(chosen, NUM_TOKENS)
    # The third token of each text ends all of them, but not before ten.
    stops = tuple({text[2] for text in plain if len(text) > 2})
    for setting, expected in (
        (GREEDY, plain),
        (
            OF_GENERATE,
            reference.greedy(
                chosen,
                NUM_TOKENS,
                stops,
                min_new_tokens=10,
                repetition_penalty=1.2,
                sequence_bias=[[[3], 2.0], [[40], -3.0]],
            ),
        ),
    ):
        cases = [
            Case(tuple(prompt), 0, SETTINGS.index(setting), stops if setting is OF_GENERATE else ())
            for prompt in chosen
        ]
        assert list(TargetAlone(reference, cases, near_tie).texts.values()) == expected
    assert all(len(text) >= 10 for text in expected)
    assert any(len(text) < NUM_TOKENS for text in expected), "a stop token ended it"


def test_the_transforms_matter(alone: TargetAlone, reference: Reference) -> None:
    """Without them most of these texts are others; some would have ended before min_tokens."""
    greedy = [case for case in alone.texts if case.fields in TRANSFORMED[:4]]
    plain = reference.greedy([case.prompt for case in greedy], NUM_TOKENS)
    same = sum(alone.texts[case] == text[: len(alone.texts[case])] for case, text in zip(greedy, plain, strict=True))
    assert same <= len(greedy) // 2

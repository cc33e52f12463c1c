"""Law: coupled sampling gives the text that the target alone gives for that seed, whoever drafts and however much.

The reference shares no code with the services: plain transformers for the logits, numpy for everything after.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from draft_service.drafter import Drafter
from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.client import Client, Sample
from specdec.core.sequence import SequenceSpec
from specdec.runner.model_runner import ModelRunner
from tests.cluster import cluster
from tests.models.scripted import BranchingDrafter, RandomDrafter, WatchingVerifier
from tests.parity.conftest import Reference
from tests.parity.reference import Race, coupled_exponentials, sample_seed

pytestmark = pytest.mark.slow

PROMPT_LENGTH = 24  # all alike, so that the reference can compute them side by side without padding
NUM_TOKENS = 24
FILTERS: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}]
SETTINGS = [{"temperature": t, **filters} for t in (0.5, 1.0) for filters in FILTERS]
SETTINGS.append({"temperature": 1.0, "min_p": 0.05})
SEEDS = (0, 7, 2**32 + 1, 2**64 - 1)


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    seed: int
    setting: int  # index into SETTINGS

    async def generate(self, client: Client, num_draft_tokens: int, n: int = 1) -> list[Sample]:
        return await client.generate(
            token_ids={"token_ids": self.prompt},
            max_tokens=NUM_TOKENS,
            seed=self.seed,
            num_draft_tokens=num_draft_tokens,
            n=n,
            **SETTINGS[self.setting],
        )


class TargetAlone:
    """The texts of all cases, by the reference sampler."""

    def __init__(self, reference: Reference, cases: Sequence[Case]) -> None:
        self._reference = reference
        self._vocab_size = reference.model.config.vocab_size
        self.texts: dict[Case, list[int]] = {case: [] for case in cases}
        live = list(cases)
        for _ in range(NUM_TOKENS):
            rows = reference.logits_after([[*case.prompt, *self.texts[case]] for case in live]).numpy()
            for case, row in zip(live, rows, strict=True):
                self.texts[case].append(self._race(case, len(self.texts[case]), row).winner)
            live = [case for case in live if self.texts[case][-1] != reference.end_token]
        for text in self.texts.values():
            if text[-1] == reference.end_token:
                text.pop()

    def _race(self, case: Case, position: int, logits: Any) -> Race:
        noise = coupled_exponentials(case.seed, PROMPT_LENGTH + position, self._vocab_size)
        return Race(logits, noise, **SETTINGS[case.setting])

    def diverges(self, case: Case, got: Sequence[int]) -> bool:
        """False if ``got`` is the text. If it is not, the first difference has to be a near tie."""
        expected = self.texts[case]
        if list(got) == expected:
            return False
        end = self._reference.end_token
        at = next(i for i in range(NUM_TOKENS) if [*got, end][i : i + 1] != [*expected, end][i : i + 1])
        logits = self._reference.logits_after([[*case.prompt, *expected[:at]]])[0].numpy()
        race, candidate = self._race(case, at, logits), [*got, end][at]
        print(f"divergence in {SETTINGS[case.setting]}, seed {case.seed}, position {at}: {candidate}, {race.winner}")
        assert race.nearly(candidate), f"{list(got)} instead of {expected}"
        return True


@pytest.fixture(scope="module")
def cases(prompts: list[list[int]]) -> list[Case]:
    """Every setting with every seed, each on a prompt of its own as far as they go round."""
    pairs = [(setting, seed) for setting in range(len(SETTINGS)) for seed in SEEDS]
    return [
        Case(tuple(prompts[index % len(prompts)][:PROMPT_LENGTH]), seed, setting)
        for index, (setting, seed) in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def alone(reference: Reference, cases: list[Case]) -> TargetAlone:
    return TargetAlone(reference, cases)


def nobody(*_: Any) -> list[Drafter]:
    return []


def demo_draft(target: ModelRunner, draft: ModelRunner, texts: dict[Case, list[int]]) -> list[Drafter]:
    return [LanguageModelDrafter(draft)]


def random_tokens(target: ModelRunner, draft: ModelRunner, texts: dict[Case, list[int]]) -> list[Drafter]:
    return [RandomDrafter(target.info)]


def branching(target: ModelRunner, draft: ModelRunner, texts: dict[Case, list[int]]) -> list[Drafter]:
    def setting(case: Case) -> tuple[float, int, float, float]:
        fields = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **SETTINGS[case.setting]}
        return fields["temperature"], fields["top_k"], fields["top_p"], fields["min_p"]

    by_spec = {(case.prompt, case.seed, setting(case)): text for case, text in texts.items()}

    def continuation(spec: SequenceSpec) -> list[int]:
        params = spec.sampling
        wanted = (params.temperature, params.top_k, params.top_p, params.min_p)
        return by_spec[spec.token_ids[:PROMPT_LENGTH], spec.seed, wanted]

    return [BranchingDrafter(target.info, continuation)]


@pytest.mark.parametrize(
    ("drafters", "num_draft_tokens"),
    [(nobody, [0, 4]), (demo_draft, range(1, 9)), (random_tokens, [3, 5]), (branching, [4, 8, 20])],
    ids=["nobody", "demo draft", "random tokens", "branching trees"],
)
async def test_coupled_text_does_not_depend_on_the_draft(
    target_runner: ModelRunner,
    draft_runner: ModelRunner,
    cases: list[Case],
    alone: TargetAlone,
    drafters: Callable[..., list[Drafter]],
    num_draft_tokens: Sequence[int],
) -> None:
    verifier = WatchingVerifier(target_runner)
    drafts = drafters(target_runner, draft_runner, alone.texts)
    async with cluster([verifier], drafts) as deployment:
        # In another order each time, and so in other company.
        order = random.Random(len(num_draft_tokens)).sample(range(len(cases)), len(cases))
        outputs = await asyncio.gather(
            *(cases[i].generate(deployment.client, num_draft_tokens[i % len(num_draft_tokens)]) for i in order)
        )
        await deployment.settled(30.0)
    got = {cases[index]: sample.token_ids for index, [sample] in zip(order, outputs, strict=True)}
    divergences = sum(alone.diverges(case, ids) for case, ids in got.items())
    print(f"{len(got)} texts, {sum(map(len, got.values()))} tokens, {divergences} divergences at near ties; {verifier}")
    assert divergences <= 1
    assert len({tuple(ids) for ids in got.values()}) > len(cases) // 2
    if drafters is nobody:
        assert verifier.num_trees == 0
    if drafters is demo_draft:
        assert verifier.num_accepted > len(cases)
    if drafters is branching:
        assert verifier.num_branching_trees > 100
        assert verifier.num_accepted_deep_late_siblings > 25


async def test_sample_i_is_what_its_own_seed_gives(
    target_runner: ModelRunner, draft_runner: ModelRunner, cases: list[Case]
) -> None:
    chosen = [case for case in cases if case.setting in (4, 6) and case.seed in (7, 2**64 - 1)]
    async with cluster([WatchingVerifier(target_runner)], [LanguageModelDrafter(draft_runner)]) as deployment:
        for case in chosen:
            together = await case.generate(deployment.client, 4, n=3)
            assert len({tuple(sample.token_ids) for sample in together}) == 3
            for index, sample in enumerate(together):
                own = Case(case.prompt, sample_seed(case.seed, index), case.setting)
                [single] = await own.generate(deployment.client, 2 * index)
                assert single.token_ids == sample.token_ids
        await deployment.settled(30.0)

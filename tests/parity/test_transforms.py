"""Law: penalties, bias and min_tokens are the target's own too, at temperature 0 and above, whoever drafts.

The references share no code with the services: transformers' generate, and plain transformers for the logits with
numpy for everything after. Replicas lose sequences on the way, so what a text did to its logits is made up again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from draft_service.drafter import Drafter
from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.client import Client, Sample
from specdec.core.errors import Preempted, SpecdecError
from specdec.core.rounds import Timings
from specdec.core.sequence import SequenceSpec
from specdec.runner.model_runner import ModelRunner
from target_service.verifier import Decision, Job
from tests.cluster import cluster
from tests.models.scripted import BranchingDrafter, WatchingVerifier
from tests.parity import reference as by_the_book
from tests.parity.conftest import Reference

PROMPT_LENGTH = 24  # all alike, so that the reference can compute them side by side without padding
NUM_TOKENS = 24
TRANSFORMS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"frequency_penalty": -0.3, "logit_bias": {11: 4.0, 200: -100.0}},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "min_tokens": 9, "logit_bias": {7: 1.5}},
]
SETTINGS = [
    {"temperature": temperature, **filters, **transforms}
    for temperature, filters in ((0.0, {}), (1.0, {}), (0.7, {"top_k": 30, "top_p": 0.9}))
    for transforms in TRANSFORMS
]


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    seed: int
    setting: int  # index into SETTINGS
    stop: int  # a token that ends the text, and that the text would have early

    async def generate(self, client: Client, num_draft_tokens: int) -> Sample:
        [sample] = await client.generate(
            token_ids={"token_ids": self.prompt},
            max_tokens=NUM_TOKENS,
            seed=self.seed,
            stop_token_ids=[self.stop],
            num_draft_tokens=num_draft_tokens,
            **SETTINGS[self.setting],
        )
        return sample


class TargetAlone:
    """The texts of all cases, without the token that ended them."""

    def __init__(self, reference: Reference, cases: Sequence[Case]) -> None:
        self._reference = reference
        self._vocab_size = reference.model.config.vocab_size
        self.texts: dict[Case, list[int]] = {case: [] for case in cases}
        live = list(cases)
        for _ in range(NUM_TOKENS):
            rows = reference.logits_after([[*case.prompt, *self.texts[case]] for case in live]).numpy()
            for case, row in zip(live, rows, strict=True):
                self.texts[case].append(self._winner(case, self.texts[case], row))
            live = [case for case in live if self.texts[case][-1] not in self._ends(case)]
        for case, text in self.texts.items():
            if text[-1] in self._ends(case):
                text.pop()

    def _ends(self, case: Case) -> list[int]:
        return [case.stop, self._reference.end_token]

    def _logits(self, case: Case, output: Sequence[int], row: np.ndarray) -> np.ndarray:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")
        fields = {name: value for name, value in SETTINGS[case.setting].items() if name in names}
        return by_the_book.transformed(row, case.prompt, output, **fields, end_token_ids=self._ends(case))

    def _winner(self, case: Case, output: Sequence[int], row: np.ndarray) -> int:
        logits = self._logits(case, output, row)
        if SETTINGS[case.setting]["temperature"] == 0.0:
            return int(logits.argmax())
        return self._race(case, output, logits).winner

    def _race(self, case: Case, output: Sequence[int], logits: np.ndarray) -> by_the_book.Race:
        noise = by_the_book.coupled_exponentials(case.seed, PROMPT_LENGTH + len(output), self._vocab_size)
        filters = {k: v for k, v in SETTINGS[case.setting].items() if k in ("temperature", "top_k", "top_p")}
        return by_the_book.Race(logits, noise, **filters)

    def diverges(self, case: Case, got: Sequence[int]) -> bool:
        """False if ``got`` is the text. If it is not, the first difference has to be a near tie."""
        expected = self.texts[case]
        if list(got) == expected:
            return False
        at = next(i for i in range(NUM_TOKENS) if [*got, -1][i : i + 1] != [*expected, -1][i : i + 1])
        row = self._reference.logits_after([[*case.prompt, *expected[:at]]])[0].numpy()
        logits = self._logits(case, expected[:at], row)
        candidates = [got[at]] if at < len(got) else self._ends(case)
        if SETTINGS[case.setting]["temperature"] == 0.0:
            near = any(logits.max() - logits[token] < 1e-4 for token in candidates)
        else:
            near = any(self._race(case, expected[:at], logits).nearly(token) for token in candidates)
        assert near, f"{list(got)} instead of {expected} in {SETTINGS[case.setting]}"
        return True


@pytest.fixture(scope="module")
def cases(reference: Reference, prompts: list[list[int]]) -> list[Case]:
    chosen = []
    for setting in range(len(SETTINGS)):
        for seed in (5, 2**64 - 3):
            prompt = prompts[len(chosen) % len(prompts)][:PROMPT_LENGTH]
            chosen.append(Case(tuple(prompt), seed, setting, stop=prompt[-3]))
    return chosen


@pytest.fixture(scope="module")
def alone(reference: Reference, cases: list[Case]) -> TargetAlone:
    return TargetAlone(reference, cases)


class ForgetfulVerifier(WatchingVerifier):
    """Has no memory for some job now and then, so that some sequence is replayed."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._random = random.Random(4)

    def verify(self, jobs: Sequence[Job]) -> tuple[list[Decision | SpecdecError | None], Timings]:
        spared = [self._random.random() > 0.02 for _ in jobs]
        decisions, timings = super().verify([job for job, spare in zip(jobs, spared, strict=True) if spare])
        left = iter(decisions)
        return [next(left) if spare else Preempted("no memory") for spare in spared], timings


def nobody(*_: Any) -> list[Drafter]:
    return []


def demo_draft(target: ModelRunner, draft: ModelRunner, texts: dict[Case, list[int]]) -> list[Drafter]:
    return [LanguageModelDrafter(draft)]


def branching(target: ModelRunner, draft: ModelRunner, texts: dict[Case, list[int]]) -> list[Drafter]:
    by_prompt = {(case.prompt, case.seed): text for case, text in texts.items()}

    def continuation(spec: SequenceSpec) -> list[int]:
        return by_prompt[spec.token_ids[:PROMPT_LENGTH], spec.seed] or [1]

    return [BranchingDrafter(target.info, continuation)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafters", "num_draft_tokens"),
    [(nobody, [0]), (demo_draft, range(1, 9)), (branching, [4, 8, 20])],
    ids=["nobody", "demo draft", "branching trees"],
)
async def test_transformed_text_does_not_depend_on_the_draft(
    target_runner: ModelRunner,
    draft_runner: ModelRunner,
    cases: list[Case],
    alone: TargetAlone,
    drafters: Callable[..., list[Drafter]],
    num_draft_tokens: Sequence[int],
) -> None:
    verifier = ForgetfulVerifier(target_runner)
    async with cluster([verifier], drafters(target_runner, draft_runner, alone.texts)) as deployment:
        order = random.Random(len(num_draft_tokens)).sample(range(len(cases)), len(cases))
        samples = await asyncio.gather(
            *(cases[i].generate(deployment.client, num_draft_tokens[i % len(num_draft_tokens)]) for i in order)
        )
        await deployment.settled(30.0)
    divergences = sum(alone.diverges(cases[i], sample.token_ids) for i, sample in zip(order, samples, strict=True))
    num_replays = sum(sample.finish.speculation.num_replays for sample in samples)
    print(f"{len(samples)} texts, {divergences} divergences at near ties, {num_replays} replays; {verifier}")
    assert divergences <= 1
    assert num_replays > 0
    if drafters is demo_draft:
        assert verifier.num_accepted > len(cases)
    if drafters is branching:
        assert verifier.num_branching_trees > 20
        assert verifier.num_accepted_deep_late_siblings > 5


def test_the_settings_matter(cases: list[Case], alone: TargetAlone, reference: Reference) -> None:
    """Without the transforms most of these texts are others; some would have ended before min_tokens."""
    greedy = [case for case in cases if SETTINGS[case.setting]["temperature"] == 0.0]
    plain = reference.greedy([case.prompt for case in greedy], NUM_TOKENS)
    same = sum(alone.texts[case] == text[: len(alone.texts[case])] for case, text in zip(greedy, plain, strict=True))
    assert same <= len(greedy) // 2


async def test_greedy_text_is_that_of_transformers_generate(
    reference: Reference, target_runner: ModelRunner, draft_runner: ModelRunner, prompts: list[list[int]]
) -> None:
    chosen = [prompt[:PROMPT_LENGTH] for prompt in prompts[20:32]]
    # What each text alone would have as its third token ends all of them, but not before ten.
    stops = sorted({text[-1] for text in reference.greedy(chosen, 3)})
    drafters: list[Drafter] = [LanguageModelDrafter(draft_runner)]
    async with cluster([WatchingVerifier(target_runner)], drafters) as deployment:
        samples = await asyncio.gather(
            *(
                deployment.client.generate(
                    token_ids={"token_ids": prompt},
                    max_tokens=NUM_TOKENS,
                    temperature=0.0,
                    repetition_penalty=1.2,
                    logit_bias={3: 2.0, 40: -3.0},
                    min_tokens=10,
                    stop_token_ids=stops,
                    num_draft_tokens=1 + index % 8,
                )
                for index, prompt in enumerate(chosen)
            )
        )
    expected = reference.greedy(
        chosen,
        NUM_TOKENS,
        stops,
        min_new_tokens=10,
        repetition_penalty=1.2,
        sequence_bias=[[[3], 2.0], [[40], -3.0]],
    )
    assert [sample.token_ids for [sample] in samples] == expected
    assert all(len(text) >= 10 for text in expected)
    assert any(len(text) < NUM_TOKENS for text in expected), "a stop token ended it"

"""The texts that the target alone gives, by a sampler that shares no code with the services.

Plain transformers for the logits, numpy for everything after (tests.parity.reference).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from transformers import DynamicCache

from specdec.client import Client, Sample
from tests.parity import reference as by_the_book
from tests.parity.conftest import Reference

NUM_TOKENS = 24
GREEDY = {"temperature": 0.0}
FILTERS: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}]
COUPLED = [{"temperature": t, **filters} for t in (0.5, 1.0) for filters in FILTERS]
COUPLED.append({"temperature": 1.0, "min_p": 0.05})
TRANSFORMS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"frequency_penalty": -0.3, "logit_bias": {11: 4.0, 200: -100.0}},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "min_tokens": 9, "logit_bias": {7: 1.5}},
]
TRANSFORMED = [
    {**sampling, **transforms}
    for sampling in (GREEDY, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 30, "top_p": 0.9})
    for transforms in TRANSFORMS
]
# Transforms that transformers' generate has, too.
OF_GENERATE: dict[str, Any] = {**GREEDY, "repetition_penalty": 1.2, "logit_bias": {3: 2.0, 40: -3.0}, "min_tokens": 10}
SETTINGS = [GREEDY, *COUPLED, *TRANSFORMED, OF_GENERATE]


@dataclass(frozen=True)
class Case:
    """A request."""

    prompt: tuple[int, ...]
    seed: int
    setting: int  # index into SETTINGS
    stops: tuple[int, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        return SETTINGS[self.setting]

    @property
    def request(self) -> dict[str, Any]:
        prompt = {"token_ids": {"token_ids": self.prompt}, "max_tokens": NUM_TOKENS}
        return prompt | {"seed": self.seed, "stop_token_ids": self.stops, **self.fields}

    async def generate(self, client: Client, num_draft_tokens: int, n: int = 1) -> list[Sample]:
        return await client.generate(**self.request, num_draft_tokens=num_draft_tokens, n=n)


class TargetAlone:
    """The texts of all cases, without the token that ended them."""

    def __init__(self, reference: Reference, cases: Sequence[Case], near_tie: float) -> None:
        self._reference, self._near_tie = reference, near_tie
        self.texts: dict[Case, list[int]] = {case: [] for case in cases}
        for _, group in groupby(sorted(cases, key=lambda case: len(case.prompt)), lambda case: len(case.prompt)):
            self._decode(list(group))

    def _decode(self, cases: Sequence[Case]) -> None:
        """Cases with prompts of one length."""
        cache = DynamicCache()
        rows = self._reference.logits_after([case.prompt for case in cases], cache)
        for _ in range(NUM_TOKENS):
            for case, row in zip(cases, rows.numpy(), strict=True):
                self.texts[case].append(self._winner(case, self.texts[case], row))
            rows = self._reference.logits_after([[self.texts[case][-1]] for case in cases], cache)
        for case in cases:
            text = self.texts[case]
            del text[next((i for i, token in enumerate(text) if token in self._ends(case)), NUM_TOKENS) :]

    def _ends(self, case: Case) -> list[int]:
        return [*case.stops, self._reference.end_token]

    def _logits(self, case: Case, output: Sequence[int], row: np.ndarray) -> np.ndarray:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")
        fields = {name: value for name, value in case.fields.items() if name in names}
        return by_the_book.transformed(row, case.prompt, output, **fields, end_token_ids=self._ends(case))

    def _winner(self, case: Case, output: Sequence[int], row: np.ndarray) -> int:
        logits = self._logits(case, output, row)
        return int(logits.argmax()) if not case.fields["temperature"] else self._race(case, output, logits).winner

    def _race(self, case: Case, output: Sequence[int], logits: np.ndarray) -> by_the_book.Race:
        position = len(case.prompt) + len(output)
        noise = by_the_book.coupled_exponentials(case.seed, position, self._reference.vocab_size)
        filters = {k: v for k, v in case.fields.items() if k in ("temperature", "top_k", "top_p", "min_p")}
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
        print(f"divergence in {case.fields}, seed {case.seed}, output position {at}: {candidates}")
        if not case.fields["temperature"]:
            near = any(logits.max() - logits[token] < self._near_tie for token in candidates)
        else:
            near = any(self._race(case, expected[:at], logits).nearly(token, self._near_tie) for token in candidates)
        assert near, f"{list(got)} instead of {expected} in {case.fields}"
        return True

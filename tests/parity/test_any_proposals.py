"""Methods that learn from texts, when what they learnt is random, NaN or the text itself: it stays the target's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from orchestrator.control import controller
from orchestrator.control.draft_length import DraftLength
from orchestrator.drafting.text_history import TextHistory
from specdec.runner.model_runner import ModelRunner
from specdec.speculation.prompt_lookup import LONGEST
from target_service.language_model import LmVerifier
from target_service.self_draft.lookahead import Gram, Lookahead, Pool, Window
from target_service.self_draft.recycling import Recycling, Table
from target_service.self_draft.trees import Passed, SelfDrafter, SelfDraftTrees
from tests.parity.written_heads import Text, texts_are_the_targets

pytestmark = pytest.mark.slow

CHAIN = [[0, 0, 0, 0]]


class WrongTable(Recycling):
    """Each token has random successors with random logits, or with NaN."""

    def __init__(self, vocab_size: int, logit: float | None = None) -> None:
        super().__init__(vocab_size)
        rng = np.random.default_rng(1)
        self._table = Table(vocab_size)
        shape = self._table.tokens.shape
        self._table.tokens[:] = [rng.choice(vocab_size, shape[1], replace=False) for _ in range(vocab_size)]
        self._table.logits[:] = -np.sort(rng.random(shape)) if logit is None else logit
        self._table.known[:] = True

    def open(self, salt: bytes) -> Table:
        return self._table

    def learn(self, state: Table, passed: Passed) -> None: ...


class RandomPool(Pool):
    """Has n-grams after each token."""

    def __init__(self, size: int, length: int, vocab_size: int) -> None:
        super().__init__(size)
        self._size, self._length, self._vocab_size = size, length, vocab_size

    def after(self, token: int) -> list[Gram]:
        rng = random.Random(token)
        return [tuple(rng.randrange(self._vocab_size) for _ in range(self._length)) for _ in range(self._size)]


class RandomLookahead(Lookahead):
    def __init__(self, vocab_size: int) -> None:
        super().__init__(4, 3, 4)
        self._vocab_size = vocab_size

    def open(self, salt: bytes) -> Window:
        return Window(RandomPool(4, 2, self._vocab_size))


@pytest.mark.parametrize("wrong", ["random rows", "rows of NaN", "random rows in chains", "random n-grams"])
async def test_the_text_is_the_targets_whatever_was_learnt(
    wrong: str, target_runner: ModelRunner, prompts: list[list[int]]
):
    size = target_runner.info.vocab_size
    own: SelfDrafter
    if wrong == "random n-grams":
        own = RandomLookahead(size)
    else:
        own = SelfDraftTrees(
            WrongTable(size, float("nan") if "NaN" in wrong else None), CHAIN if "chains" in wrong else ()
        )
    told = await texts_are_the_targets(target_runner, own, prompts)
    proposed, accepted = (
        sum(getattr(each, f"num{name}_self_draft_tokens") for each in told) for name in ("", "_accepted")
    )
    assert (proposed == 0) == ("NaN" in wrong)
    assert accepted <= 0.2 * proposed


class KnownTable(Recycling):
    """What followed each token of a text, the latest first."""

    def __init__(self, vocab_size: int, text: Sequence[int]) -> None:
        super().__init__(vocab_size)
        self._table = table = Table(vocab_size)
        table.tokens[:], table.logits[:] = np.arange(8), np.arange(0, -8, -1) * 0.1
        for token, following in pairwise(text):
            others = [each for each in table.tokens[token] if each != following]
            table.tokens[token], table.known[token] = [following, *others[:7]], True

    def open(self, salt: bytes) -> Table:
        return self._table

    def learn(self, state: Table, passed: Passed) -> None: ...


class KnownGrams(Lookahead):
    """Knows the n-grams of a text."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(2, 4, 16)
        self._text = text

    def open(self, salt: bytes) -> Window:
        pool = Pool(16)
        for start in range(len(self._text) - 3):
            pool.add(self._text[start : start + 4])
        return Window(pool)


@pytest.mark.parametrize(("method", "temperature"), [("recycling", 0.0), ("recycling", 1.0), ("lookahead", 1.0)])
def test_what_was_learnt_of_the_text_itself_is_accepted(
    method: str, target_runner: ModelRunner, prompts: list[list[int]], temperature: float
):
    for prompt in prompts[:2]:
        plain = Text(LmVerifier(target_runner), prompt[:12], 0, temperature)
        while len(plain.ids) < 60:
            plain.step()
        plain.verifier.close(plain.state)
        own: SelfDrafter = KnownGrams(plain.ids)
        if method == "recycling":
            own = SelfDraftTrees(KnownTable(target_runner.info.vocab_size, plain.ids))
        text = Text(LmVerifier(target_runner, own), prompt[:12], 64, temperature)
        text.step()
        while len(text.ids) < 50:
            before = len(text.ids)
            text.step()
            # At lookahead an n-gram and the token after it.
            assert method == "recycling" or len(text.ids) - before >= 4
        assert len(text.trees) < 24
        assert text.ids[:50] == plain.ids[:50]
        text.verifier.close(text.state)


@pytest.mark.parametrize("is_true", [True, False])
async def test_the_text_is_the_targets_whatever_past_answers_say(
    is_true: bool, target_runner: ModelRunner, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Each question was asked before, so that the history has its answer, or what is found is random."""
    rng = random.Random(1)
    if not is_true:
        monkeypatch.setattr(
            TextHistory,
            "find",
            lambda history, owner, ids, at_least: (LONGEST, [ids[-1], *(rng.randrange(4096) for _ in range(8))]),
        )
    monkeypatch.setattr(DraftLength, "best_lookup", lambda policy, chances, to_come: (len(chances), 1e9))
    monkeypatch.setattr(controller._Trust, "holds", lambda trust, now: True)
    settings: dict[str, Any] = {"num_draft_tokens": None, "lookup_history": 1 << 14}
    told = await texts_are_the_targets(
        target_runner, None, prompts, numbers=(None,), were_asked_before=True, **settings
    )
    proposed, accepted = (sum(getattr(each, f"num{name}_lookup_tokens") for each in told) for name in ("", "_accepted"))
    assert proposed > 100
    assert (accepted > 0.8 * proposed) == is_true

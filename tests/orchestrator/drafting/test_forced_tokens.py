"""What a grammar forces is proposed, as far as it came true so far; where it forces nothing, the text is looked up."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from orchestrator.drafting.forced_tokens import ForcedTokens
from specdec.speculation.prompt_lookup import HitRates, PromptLookup


class Script:
    """A grammar of one text with tokens that may be anything (0)."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.at = tokens, 0

    def mask(self) -> Script:
        return self

    def advance(self, token_id: int) -> bool:
        self.at += 1
        return True

    def forced(self) -> list[int]:
        rest = self.tokens[self.at :]
        return list(rest[: rest.index(0)] if 0 in rest else rest)


def drafter(*tokens: int) -> ForcedTokens:
    compiled: Future[Any] = Future()
    compiled.set_result(Script(*tokens))
    return ForcedTokens(compiled, 2, PromptLookup(HitRates()))


def test_forced_tokens_are_proposed_in_order_and_only_they() -> None:
    forced = drafter(7, 8, 9, 0, 5)
    assert len(forced.chances([1, 2])) == 3
    assert forced.propose(2).token_ids == (7, 8)
    assert not forced.in_text
    assert len(forced.chances([1, 2, 7])) == 2
    assert forced.propose(5).token_ids == (8, 9)
    assert forced.chances([1, 2, 7, 8, 9]) == []
    assert len(forced.chances([1, 2, 7, 8, 9, 4])) == 1
    assert forced.chances([1, 2, 7, 8, 9, 4, 5]) == []


def test_a_target_that_writes_other_tokens_is_believed() -> None:
    forced, ids = drafter(*[7] * 40), [1, 2]
    before = forced.chances(ids)[0]
    for _ in range(12):
        ids.append(6)
        chance = forced.chances(ids)[0]
    assert chance < before / 2
    assert forced.doubtful(3)


def test_a_text_that_repeats_itself_is_looked_up_where_nothing_is_forced() -> None:
    forced = drafter(*[0] * 40)
    ids = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    assert forced.chances(ids)
    assert forced.in_text, "a target can find it by itself"
    assert forced.propose(2).token_ids == (5, 6)


@pytest.mark.parametrize("number", [1, 3])
def test_the_chances_are_those_of_the_measured_share(number: int) -> None:
    chances = drafter(7, 8, 9).chances([1, 2])
    assert chances[number - 1] == pytest.approx(chances[0] ** number)

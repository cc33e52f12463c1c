"""A draft and a target made of plain Python, for the loop without a network."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer

from orchestrator.request import Caller, DraftOptions, Request, Stops
from orchestrator.rounds import Exchange, Grant, Proposal, RoundPlan, RoundRecord, Source
from orchestrator.sequence import Sequence
from specdec.core.rounds import OVERRUN, Budget, Growth, GrowthEnd, Verdict
from specdec.core.sequence import Method, SamplingParams
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.speculation.prompt_lookup import HitRates


def new_request(
    prompt: Iterable[int] = (1, 2),
    max_tokens: int = 20,
    method: Method = Method.COUPLED,
    temperature: float = 1.0,
    *,
    sampling: SamplingParams | None = None,
    stop: Iterable[str] = (),
    stop_token_ids: Iterable[int] = (),
    received: Iterable[int] = (),
    cache_salt: bytes = b"",
    seed: int = 0,
) -> Request:
    """``received``: ids that the first sample resumes with."""
    return Request(
        prompt_ids=array("I", prompt),
        sampling=sampling or SamplingParams(temperature),
        stops=Stops(max_tokens, tuple(stop), frozenset(stop_token_ids)),
        drafting=DraftOptions(method),
        seed=seed,
        resume={0: array("I", received)},
        caller=Caller(cache_salt=cache_salt),
    )


def new_sequence(*prompt_and_options: Any, tokenizer: Tokenizer | None = None, **options: Any) -> Sequence:
    """The first sample of a new request."""
    return Sequence(new_request(*prompt_and_options, **options), 0, tokenizer)


def plan(num_tokens: int = 0, depth: int = 0, lookup: int | None = None, **rest: Any) -> RoundPlan:
    """Waits for ``num_tokens`` of the draft, and takes ``depth`` that are there. One of the lookup comes at place
    ``lookup`` of the grants: all its tokens."""
    grants = [Grant(Source.DRAFT, depth)] if depth else []
    grants += [Grant(Source.DRAFT, num_tokens, waits=True)] if num_tokens else []
    if lookup is not None:
        grants.insert(lookup, Grant(Source.LOOKUP, 16))
    return RoundPlan(tuple(grants), **rest)


class FakeLookup:
    """Proposes a chain."""

    def __init__(self, *token_ids: int, doubtful: bool = True) -> None:
        self.token_ids = token_ids
        self._doubtful = doubtful

    def propose(self, num_tokens: int) -> TokenTree:
        return TokenTree.chain(self.token_ids[:num_tokens])

    def doubtful(self, num_tokens: int) -> bool:
        return self._doubtful


def hit_rates(share: float) -> HitRates:
    """So often guesses came true, whatever had agreed."""
    rates = HitRates()
    for trial in range(200):
        for length in (2, 3, 4, 8, 16):
            rates.count_token(length, trial % 20 < 20 * share)
    return rates


def commit(sequence: Sequence, *token_ids: int) -> None:
    """One verdict each."""
    for token_id in token_ids:
        sequence.extend(EMPTY_TREE, Verdict(1, sequence.base, (), token_id))


class FakeDraft:
    """In place of DraftClient: gives the growths of a script, None for a loss.

    ``answer`` makes the script's next entries from every advance.
    """

    def __init__(self, answer: Callable[[FakeDraft, Sequence, Budget], Iterable[Growth | None]] | None = None) -> None:
        self.answer = answer
        self.script: list[Growth | None] = []
        self.budgets: list[Budget] = []
        self.ejected_for: list[str] = []
        self.there = True
        self.num_caught_up = 0
        self.in_flight: list[TokenTree] = []
        self.pushed: list[Growth] = []  # without being waited for
        self.num_advances = 0

    def advance(
        self, sequence: Sequence, budget: Budget, in_flight: TokenTree = EMPTY_TREE, num_there: int = 0
    ) -> bool:
        self.budgets.append(budget)
        self.in_flight.append(in_flight)
        if not self.there:
            return False
        self.num_advances += 1
        if self.answer is not None:
            self.script.extend(self.answer(self, sequence, budget))
        return True

    def catch_up(self, sequence: Sequence) -> None:
        self.num_caught_up += 1

    def arrived(self) -> Iterable[Growth]:
        pushed, self.pushed = self.pushed, []
        return pushed

    async def growth(self, sequence: Sequence, deadline_s: float, waited_s: float = 0.0) -> Growth | None:
        assert self.script, "the speculation waits for a growth that will not come"
        await asyncio.sleep(0)
        return self.script.pop(0)

    def take_answer(self) -> None:
        pass

    def eject(self, reason: str) -> None:
        self.ejected_for.append(reason)

    def grow(
        self,
        base: int,
        tree: TokenTree,
        *,
        path: tuple[int, ...] = (),
        end: GrowthEnd | None = GrowthEnd.BUDGET,
        advance: int | None = None,
    ) -> None:
        self.script.append(Growth(self.num_advances if advance is None else advance, base, path, tree, end))


def next_token(ids: list[int]) -> int:
    """The target's law: a token that depends on all of the text."""
    state = 7
    for token_id in ids:
        state = (state * 31 + token_id + 1) % 10_007
    return state % 10


class FakeTarget:
    """Greedy verification by ``next_token``. Its first verdict is an open's: round 0, which verifies nothing.

    ``next_round`` makes rounds that are sent early (set it once the speculation is there); ``too_late`` tells whether
    one comes after the verdict.
    """

    def __init__(self, too_late: Callable[[], bool] = lambda: False) -> None:
        self.trees: list[TokenTree] = []
        self.replay_next = True
        self.num_autonomous_asked: list[int] = []
        self.num_under_way = self.num_dropped = 0
        self.next_round: Callable[[Sequence], tuple[TokenTree, int]] | None = None
        self._too_late = too_late
        self._left: TokenTree | None = None  # of what was sent early, if it stands

    async def verify(self, sequence: Sequence, proposal: Proposal, plan: RoundPlan) -> tuple[Verdict, RoundRecord]:
        tree, num_autonomous = proposal.tree, plan.num_autonomous
        verdict = await self._verdict(sequence, tree, num_autonomous, plan.next_round_after_s is not None)
        return verdict, RoundRecord.of(proposal, verdict, Exchange(0.0))

    async def _verdict(self, sequence: Sequence, tree: TokenTree, num_autonomous: int, sends_early: bool) -> Verdict:
        assert tree.problem(10) is None
        assert not (tree and num_autonomous), "what is drafted is to be asked for"
        self.num_autonomous_asked.append(num_autonomous)
        self.trees.append(tree)
        left, self._left = self._left, None
        await asyncio.sleep(0)
        if self.replay_next:
            self.replay_next = False
            return Verdict(0, sequence.base, (), next_token(sequence.ids))
        assert left in (None, tree), "the target is in a pass with another tree"
        text, accepted, node = list(sequence.ids), [], ROOT
        while (child := tree.child(node, next_token(text))) is not None:
            node = child
            accepted.append(child)
            text.append(tree.token_ids[child])
        text.append(next_token(text))
        dropped = 0
        if self.next_round is not None and sends_early:
            sent, max_nodes = self.next_round(sequence)
            if sent:
                self._left = self._left_of(sent, max_nodes, text[sequence.base :])
                dropped = 0 if self._left is not None else len(self.trees) + 1
        return Verdict(len(self.trees), sequence.base, tuple(accepted), text[-1], dropped_round=dropped)

    def _left_of(self, sent: TokenTree, max_nodes: int, committed: list[int]) -> TokenTree | None:
        """What is left of an early round after the verdict, which commits these tokens; None: it is dropped."""
        assert max_nodes > 0
        assert sent.problem(10) is None
        left = sent.descend(committed).prefix(max_nodes)
        if not left and not self._too_late():
            self.num_dropped += 1
            return None
        self.num_under_way += 1
        return left


def still_to_come(unasked: int, num_autonomous: int) -> int:
    """After the next of so many ``unasked`` verdicts, as orchestrator.verifying.target_client asks its target."""
    if 2 * unasked <= num_autonomous:
        return num_autonomous
    return min(unasked - 1, max(num_autonomous, OVERRUN - 1))


def alone(prompt: Iterable[int], count: int) -> list[int]:
    """What the target says without anybody's help."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text

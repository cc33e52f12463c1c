"""Both model services over raw streams, many sequences at a time: the loop without the orchestrator.

Every sequence of a batch takes its turn together, so a round of all of them is two frames up and some down.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from draft_service.drafter import Drafter
from specdec.core.rounds import Advance, Budget, Growth, Round, Verdict
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import TokenTree
from specdec.transport.wire import read_growth, read_verdict, write_advance, write_budget, write_round, write_spec
from specdec.v1 import draft_pb2, target_pb2
from target_service.verifier import Verifier
from testing.raw import draft, target


class TargetStream:
    """One Verify stream."""

    def __init__(self, call: Any, vocab_size: int) -> None:
        self._call = call
        self._opened = 0
        self._vocab_size = vocab_size

    async def open(self, specs: Sequence[SequenceSpec]) -> dict[int, Verdict]:
        """Opens all of them; the verdicts of round 0 by sequence."""
        numbers = range(self._opened, self._opened + len(specs))
        self._opened += len(specs)
        opens = [
            target_pb2.TargetOpen(sequence=number, spec=write_spec(spec))
            for number, spec in zip(numbers, specs, strict=True)
        ]
        return await self._answers(target_pb2.VerifyRequest(opens=opens), numbers)

    async def verify(self, rounds: dict[int, Round]) -> dict[int, Verdict]:
        messages = [write_round(number, round_) for number, round_ in rounds.items()]
        return await self._answers(target_pb2.VerifyRequest(rounds=messages), rounds)

    async def close(self, numbers: Sequence[int]) -> None:
        await self._call.write(target_pb2.VerifyRequest(closes=numbers))

    async def _answers(self, frame: target_pb2.VerifyRequest, numbers: Any) -> dict[int, Verdict]:
        await self._call.write(frame)
        verdicts: dict[int, Verdict] = {}
        while len(verdicts) < len(numbers):
            response = await self._call.read()
            assert not response.errors, response.errors
            verdicts.update((each.sequence, read_verdict(each, self._vocab_size)) for each in response.verdicts)
        return verdicts


class DraftStream:
    """One Draft stream. Sequences open without a budget."""

    def __init__(self, call: Any, vocab_size: int) -> None:
        self._call = call
        self._opened = 0
        self._vocab_size = vocab_size

    async def open(self, specs: Sequence[SequenceSpec]) -> None:
        opens = [
            draft_pb2.DraftOpen(sequence=self._opened + index, spec=write_spec(spec), budget=write_budget(Budget()))
            for index, spec in enumerate(specs)
        ]
        self._opened += len(specs)
        await self._call.write(draft_pb2.DraftRequest(opens=opens))

    async def advance(self, advances: dict[int, Advance]) -> dict[int, TokenTree]:
        """What each tree has grown to when its growth ends."""
        messages = [write_advance(number, advance) for number, advance in advances.items()]
        await self._call.write(draft_pb2.DraftRequest(advances=messages))
        trees: dict[int, TokenTree] = {}
        while len(trees) < len(advances):
            response = await self._call.read()
            assert not response.errors, response.errors
            for message in response.growths:
                growth: Growth = read_growth(message, self._vocab_size)
                if growth.end is not None and growth.advance == advances[message.sequence].number:
                    trees[message.sequence] = growth.tree
        return trees

    async def close(self, numbers: Sequence[int]) -> None:
        await self._call.write(draft_pb2.DraftRequest(closes=numbers))


@dataclass
class Services:
    target: TargetStream
    draft: DraftStream | None

    async def generate(self, specs: Sequence[SequenceSpec], num_tokens: int, num_draft_tokens: int) -> list[list[int]]:
        """At least ``num_tokens`` output ids of every sequence; K is the same in every round."""
        budget = Budget(num_draft_tokens, num_draft_tokens)
        if self.draft is not None:
            await self.draft.open(specs)
        verdicts = await self.target.open(specs)
        first = min(verdicts)
        ids = {number: [*spec.token_ids] for number, spec in zip(sorted(verdicts), specs, strict=True)}
        known = {number: len(text) for number, text in ids.items()}  # as far as the draft knows it
        ends = {number: len(text) + num_tokens for number, text in ids.items()}
        trees = dict.fromkeys(ids, TokenTree())
        number_of_round = 0
        while verdicts:
            for number, verdict in verdicts.items():
                assert verdict.base == len(ids[number])
                ids[number] += [*(trees[number].token_ids[node] for node in verdict.accepted), verdict.next_token]
            live = [number for number in verdicts if len(ids[number]) < ends[number]]
            number_of_round += 1
            if self.draft is not None and live:
                trees = await self.draft.advance(
                    {
                        number: Advance(
                            number_of_round, len(ids[number]), tuple(ids[number][known[number] :]), budget=budget
                        )
                        for number in live
                    }
                )
                known.update((number, len(ids[number])) for number in live)
            rounds = {number: Round(number_of_round, len(ids[number]), trees[number]) for number in live}
            verdicts = await self.target.verify(rounds) if rounds else {}
        await self.target.close(list(ids))
        if self.draft is not None:
            await self.draft.close(list(ids))
        return [ids[first + index][len(spec.token_ids) :] for index, spec in enumerate(specs)]


@asynccontextmanager
async def services(verifier: Verifier, drafter: Drafter | None = None) -> AsyncIterator[Services]:
    """The two services on free ports, and one stream to each."""
    async with AsyncExitStack() as stack:
        verify = (await stack.enter_async_context(target(verifier))).call()
        stack.callback(verify.cancel)
        streams = Services(TargetStream(verify, verifier.info.vocab_size), None)
        if drafter is not None:
            call = (await stack.enter_async_context(draft(drafter))).call()
            stack.callback(call.cancel)
            streams.draft = DraftStream(call, drafter.info.vocab_size)
        yield streams

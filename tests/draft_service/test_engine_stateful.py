"""Any history of opens, advances, closes, steps and draining, held against what the contract says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.errors import Draining, InvalidArgument, OutOfStep, Overloaded, SpecdecError
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.server.step_loop import Key
from tests.draft_service.engines import CONTEXT, VOCAB, plain_drafter, proposed

MAX_SEQUENCES = 5


@dataclass
class Asked:
    """An advance that has no last growth yet; the open is number 0."""

    number: int
    base: int
    budget: Budget
    kept: int | None  # nodes that were there when it came; None: an unfinished one went before


@dataclass
class Known:
    """The state of a sequence by the contract."""

    spec: SequenceSpec
    ids: list[int]
    asked: list[Asked] = field(default_factory=list)
    number: int = 0
    grown: int = 0  # nodes of the tree as last told

    def chain(self, count: int) -> list[int]:
        """The drafter's next tokens."""
        return proposed(self.ids, count, self.spec)

    def check(self, growth: Growth) -> None:
        """The growth is the answer to the oldest unfinished advance, and keeps to what was asked."""
        assert self.asked, f"no advance asked for {growth}"
        asked = self.asked.pop(0)
        assert (growth.advance, growth.path) == (asked.number, ())
        if self.asked:
            assert (growth.end, growth.tree.token_ids) == (GrowthEnd.SUPERSEDED, ())
            return
        assert growth.base == asked.base == len(self.ids)
        length = len(growth.tree)
        assert growth.tree.is_chain
        assert growth.tree.token_ids == tuple(self.chain(length)), "the tree hangs from what is committed"
        # A node is predicted by feeding the position before it.
        room = max(0, CONTEXT - len(self.ids) + 1)
        if asked.kept is not None:
            new = max(0, min(asked.budget.max_nodes, asked.budget.max_depth - asked.kept, room - asked.kept))
            assert length == asked.kept + new
            within = new == asked.budget.max_nodes or length >= asked.budget.max_depth
            assert growth.end is (GrowthEnd.BUDGET if within else GrowthEnd.CONTEXT)
        self.grown = length


class DraftHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.drafter = plain_drafter()
        self.engine = DraftEngine(self.drafter, MAX_SEQUENCES)
        self.known: dict[Key, Known] = {}
        self.ended: list[Key] = []
        self.next = 0
        self.draining = False

    def tell(self, verb: Any, key: Key, entry: Any, expected: type[SpecdecError] | None) -> bool:
        """As the step loop does: a sequence whose entry is refused is closed."""
        if expected is None:
            verb(key, entry)
            return True
        with pytest.raises(SpecdecError) as refused:
            verb(key, entry)
        assert refused.type is expected, refused.value
        self.end(key)
        return False

    def end(self, key: Key) -> None:
        self.engine.close(key)
        self.known.pop(key, None)
        self.ended.append(key)

    @rule(
        length=st.one_of(st.integers(1, 9), st.integers(CONTEXT - 3, CONTEXT + 2)),
        method=st.sampled_from([Method.COUPLED] * 3 + [Method.TOKEN, Method.BLOCK]),
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 99),
        nodes=st.sampled_from([0, 0, 2, 5]),
        ahead=st.sampled_from([0] * 9 + [1]),
        stream=st.integers(0, 2),
    )
    def open(self, length, method, temperature, seed, nodes, ahead, stream) -> None:
        self.next += 1
        key = Key(stream, self.next)
        ids = tuple((seed * 5 + position * position) % VOCAB for position in range(length))
        spec = SequenceSpec(ids, length, SamplingParams(temperature), seed, method)
        expected: type[SpecdecError] | None = None
        if self.draining:
            expected = Draining
        elif len(self.known) >= MAX_SEQUENCES:
            expected = Overloaded
        elif ahead or (nodes and not spec.keyed_by_token):
            expected = InvalidArgument
        budget = Budget(nodes, nodes, ahead)
        if self.tell(self.engine.open, key, DraftOpen(spec, budget), expected):
            self.known[key] = Known(spec, list(ids), [Asked(0, length, budget, 0)])

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        nodes=st.integers(0, 6),
        depth=st.integers(0, 7),
        wrong=st.sampled_from([*[""] * 20, *"ndfbha"]),
    )
    def advance(self, data, nodes, depth, wrong) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[key]
        follow = data.draw(st.integers(0, 5))
        new = known.chain(follow)
        if data.draw(st.booleans()):
            new.append(data.draw(st.integers(0, VOCAB - 1)))  # the correction, or a bonus
        base = len(known.ids) + len(new) + {"b": 1, "h": -1}.get(wrong, 0)
        number = {"n": known.number, "d": max(0, known.number - 1), "f": known.number + 2}.get(wrong, known.number + 1)
        expected: type[SpecdecError] | None = None
        if number != known.number + 1 or wrong in ("b", "h"):
            expected = OutOfStep
        elif wrong == "a":
            expected = InvalidArgument
        budget = Budget(nodes, depth, int(wrong == "a"))
        if not self.tell(self.engine.submit, key, Advance(number, base, tuple(new), budget=budget), expected):
            return
        kept: int | None = 0
        if known.spec.keyed_by_token:
            matches = new == known.chain(len(new))
            kept = None if known.asked else max(0, known.grown - len(new)) if matches else 0
        known.ids += new
        known.number = number
        known.asked.append(Asked(number, base, budget, kept))

    @rule(data=st.data(), what=st.sampled_from([*["nothing"] * 6, "close", "stale", "stale", "drain"]))
    def seldom(self, data, what) -> None:
        if what == "close" and self.known:
            self.end(data.draw(st.sampled_from(sorted(self.known))))
        elif what == "stale" and self.ended:
            key, number = data.draw(st.sampled_from(self.ended)), data.draw(st.integers(0, 3))
            self.engine.submit(key, Advance(number, number))
            self.engine.close(key)
        elif what == "drain" and self.next > 6:
            self.draining = True
            self.engine.drain()

    @rule(count=st.integers(1, 4))
    def step(self, count) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> None:
        for key, result in self.engine.step():
            if isinstance(result, Growth):
                self.known[key].check(result)
            else:
                assert isinstance(result, Draining), result
                assert self.draining
                assert not self.known[key].asked, "what is unanswered is answered first"
                del self.known[key]
                self.ended.append(key)

    @invariant()
    def every_open_sequence_is_counted_and_nothing_is_left_of_the_ended(self) -> None:
        load = self.engine.load
        assert load.live_sequences == len(self.known) == len(self.drafter.live)
        assert load.waiting_sequences >= sum(bool(known.asked) for known in self.known.values())

    def teardown(self) -> None:
        for _ in range(2000):
            if self.engine.idle:
                break
            self.one_step()
        assert self.engine.idle, "the engine never comes to rest"
        assert not any(known.asked for known in self.known.values()), "an advance was never answered"
        assert not (self.draining and self.known)
        for key in list(self.known):
            self.end(key)
        assert self.drafter.live == []


TestDraftHistory = DraftHistory.TestCase
TestDraftHistory.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)

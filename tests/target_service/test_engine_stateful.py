"""Any history of opens, rounds, closes, passes and draining, held against what the contract says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.core.errors import (
    ContextExceeded,
    Draining,
    InvalidArgument,
    OutOfStep,
    Overloaded,
    Preempted,
    SpecdecError,
)
from specdec.core.rounds import Round, TargetOpen, Verdict
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.server.step_loop import Key, noop
from target_service import admission
from target_service.engine import TargetEngine
from tests.target_service.contract_model import CONTEXT, TABLE, VOCAB, Known, trees
from tests.target_service.engines import AnyMethod

MAX_SEQUENCES, CHUNK_ROWS = 6, 8


class TargetHistory(RuleBasedStateMachine):
    num_slots = 1 << 20
    headroom = admission.HEADROOM

    def __init__(self) -> None:
        super().__init__()
        self.verifier = AnyMethod(TABLE, self.num_slots, chunk_rows=CHUNK_ROWS)
        self.now = 1e9
        self.engine = TargetEngine(self.verifier, MAX_SEQUENCES, lambda: self.now)
        self.known: dict[Key, Known] = {}
        self.ended: list[Key] = []
        self.next = 0
        self.draining = False
        self.refused: tuple[SequenceSpec, float, float] | None = None  # the oldest, its arrival, when it was seen

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
        length=st.one_of(st.integers(1, 12), st.integers(1, 12), st.integers(CONTEXT - 3, CONTEXT + 1)),
        committed=st.integers(0, 5),
        method=st.sampled_from([Method.COUPLED] * 3 + [Method.TOKEN, Method.BLOCK]),
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 99),
        stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
        age=st.integers(0, 3),
        num_preemptions=st.sampled_from([0, 0, 1, 2]),
        stream=st.integers(0, 2),
        again=st.booleans(),
    )
    def open(self, length, committed, method, temperature, seed, stops, age, num_preemptions, stream, again) -> None:
        self.next += 1
        key = Key(stream, self.next)
        ids = tuple((seed * 7 + position * position) % VOCAB for position in range(length))
        spec = SequenceSpec(ids, max(1, length - committed), SamplingParams(temperature), seed, method)
        if again and self.refused is not None:
            spec, ids = self.refused[0], self.refused[0].token_ids
            length = len(ids)
        expected: type[SpecdecError] | None = None
        if self.draining:
            expected = Draining
        elif length >= CONTEXT or length >= self.num_slots:
            expected = ContextExceeded
        elif self.must_wait(spec, self.now - 1e6 * age):
            expected = Overloaded
        # Ages far apart: which request is the youngest must not depend on the clock.
        open_ = TargetOpen(spec, stops, age_s=1e6 * age, num_preemptions=num_preemptions)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(admission, "HEADROOM", self.headroom)
            accepted = self.tell(self.engine.open, key, open_, expected)
        if accepted:
            self.known[key] = Known(spec, stops, age, num_preemptions, list(ids), pending=Round(0, length))

    def must_wait(self, spec: SequenceSpec, arrived: float) -> bool:
        """The oldest of those refused comes first as long as it keeps coming back."""
        if self.refused is not None and self.now - self.refused[2] > admission.BACK_WITHIN_S:
            self.refused = None
        if self.refused is not None and self.refused[0] != spec and self.refused[1] <= arrived:
            return self.full(spec, self.refused[0])
        if not self.full(spec):
            if self.refused is not None and self.refused[0] == spec:
                self.refused = None
            return False
        if self.refused is not None and self.refused[0] == spec:
            arrived = min(arrived, self.refused[1])
        self.refused = (spec, arrived, self.now)
        return True

    def full(self, *specs: SequenceSpec) -> bool:
        sequences = [(len(spec.token_ids), spec.num_prompt_tokens) for spec in specs]
        sequences += [(len(known.ids), known.spec.num_prompt_tokens) for known in self.known.values()]
        foreseen = sum(num_ids + max(self.headroom, (num_ids - prompt) // 2) for num_ids, prompt in sequences)
        return len(sequences) > MAX_SEQUENCES or (len(sequences) > 1 and foreseen > self.num_slots)

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        num_autonomous=st.sampled_from([0, 0, 0, 3, 8, 60]),
        max_nodes=st.sampled_from([0, 0, 1, 2, 4]),
        wrong=st.sampled_from([*[""] * 12, *"nnbdfp"]),
    )
    def round(self, data, num_autonomous, max_nodes, wrong) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[key]
        base = max(known.spec.num_prompt_tokens, len(known.ids) - data.draw(st.sampled_from([0, 0, 0, 1, 2, 4])))
        base = {"b": len(known.ids) + 1, "p": known.spec.num_prompt_tokens - 1}.get(wrong, base)
        last = known.last if known.pending is None else known.pending.number
        number = {"n": last, "d": max(0, last - 1), "f": last + 2}.get(wrong, last + 1)
        tree = data.draw(trees(known, base))
        too_early = known.pending is not None and (known.early is not None or not tree or not known.spec.keyed_by_token)
        if too_early and data.draw(st.integers(0, 30)) != 0:
            return  # breaking this rule all the time would leave little else
        expected: type[SpecdecError] | None = None
        keyed = known.spec.keyed_by_token
        if (
            too_early
            or number != last + 1
            or not known.spec.num_prompt_tokens <= base <= len(known.ids)
            or (tree and not keyed and base != len(known.ids))
        ):
            expected = OutOfStep
        elif tree and not keyed and not tree.is_chain:
            expected = InvalidArgument
        elif len(known.ids) >= CONTEXT or (tree and base + max(tree.depths) >= CONTEXT):
            expected = ContextExceeded
        round_ = Round(number, base, tree, num_autonomous, max_nodes)
        if self.tell(self.engine.submit, key, round_, expected):
            if known.pending is not None:
                known.early = round_
            else:
                known.pending, known.num_autonomous, known.passes = round_, 0, 0

    @rule(data=st.data(), what=st.sampled_from([*["nothing"] * 5, "wait", "close", "stale", "stale", "drain"]))
    def seldom(self, data, what) -> None:
        if what == "wait":
            self.now += data.draw(st.sampled_from([0.5, 2.0]))
        elif what == "close" and self.known:
            self.end(data.draw(st.sampled_from(sorted(self.known))))
        elif what == "stale" and self.ended:
            key, number = data.draw(st.sampled_from(self.ended)), data.draw(st.integers(0, 3))
            self.engine.submit(key, Round(number, number))
            self.engine.close(key)
        elif what == "drain" and self.next > 6:
            self.draining = True
            self.engine.drain()

    @rule(count=st.integers(1, 4))
    def step(self, count) -> None:
        for _ in range(count):
            self.one_step()

    @rule(data=st.data(), number=st.integers(1, 3))
    def step_with_orders_meanwhile(self, data, number) -> None:
        """Rounds that come early, closes and draining while a pass is made."""

        def poll() -> None:
            for _ in range(number):
                asked = sorted(key for key, known in self.known.items() if known.pending is not None)
                if not asked:
                    return
                key = data.draw(st.sampled_from(asked))
                known = self.known[key]
                what = data.draw(st.sampled_from(["early", "early", "early", "close", "drain"]))
                if what == "close":
                    self.end(key)
                elif what == "drain" and self.next > 6:
                    self.draining = True
                    self.engine.drain()
                elif known.early is None and known.spec.keyed_by_token:
                    tree = data.draw(trees(known, len(known.ids)))
                    if tree and len(known.ids) + max(tree.depths) < CONTEXT:
                        known.early = Round(known.pending.number + 1, len(known.ids), tree)
                        self.engine.submit(key, known.early)

        self.one_step(poll)

    def one_step(self, poll: Callable[[], None] = noop) -> None:
        waiting = {key for key, known in self.known.items() if known.pending is not None or known.num_autonomous}
        results = list(self.engine.step(poll))
        waiting &= self.known.keys()
        preempted = [key for key, result in results if isinstance(result, Preempted)]
        verdicts = [key for key, result in results if isinstance(result, Verdict)]
        assert len(verdicts) == len(set(verdicts)), "one verdict of a sequence in a pass"
        assert len(preempted) <= 1, "one gives way at a time"
        for key in waiting:
            self.known[key].passes += 1
        for key, result in results:
            if isinstance(result, Verdict):
                assert key in waiting
                self.take(self.known[key], result)
            elif isinstance(result, Preempted):
                assert len(waiting) > len(verdicts), "some sequence lacked memory"
                self.check_victim(key)
                self.end_by_itself(key)
            else:
                assert isinstance(result, Draining), result
                assert self.draining
                assert self.known[key].pending is None, "what is unanswered is answered first"
                self.end_by_itself(key)
        if not preempted:
            longest = CONTEXT // CHUNK_ROWS + 2
            assert self.num_slots < 1 << 20 or all(known.passes <= longest for known in self.known.values())
        if self.draining:
            assert all(known.pending is not None for known in self.known.values())

    def check_victim(self, key: Key) -> None:
        victim = self.known[key]
        others = [known for other, known in self.known.items() if other != key]
        if not others:
            return
        oldest = max(known.age for known in others)
        assert victim.age <= oldest, "the oldest never gives way"
        spared = [known for known in others if known.age < oldest]
        assert all(victim.num_preemptions <= known.num_preemptions for known in spared), (
            "the one preempted least often gives way"
        )
        same = [known for known in spared if known.num_preemptions == victim.num_preemptions]
        assert all(victim.age <= known.age for known in same), "of those the youngest"

    def take(self, known: Known, verdict: Verdict) -> None:
        is_short = self.num_slots < 1 << 20
        expected = known.answer(tree_gave_way=is_short and not verdict.accepted)
        if known.pending is not None:
            num_autonomous = verdict.base - known.pending.base
            known.last, known.num_autonomous = (
                known.pending.number,
                max(0, known.pending.num_autonomous - num_autonomous),
            )
        else:
            known.num_autonomous -= 1
        new = known.text(len(verdict.accepted) + 1)
        known.ids += new
        known.pending, known.passes = None, 0
        ends = len(known.ids) >= CONTEXT or bool(known.stops & set(new))
        dropped = 0
        if known.early is not None:
            if ends or self.draining or not known.left_of(known.early)[1]:
                dropped = known.early.number
            else:
                known.pending = known.early
            known.early = None
            known.num_autonomous = 0
        if ends:
            known.num_autonomous = 0
        assert dataclasses.replace(verdict, timings=expected.timings) == dataclasses.replace(
            expected, num_autonomous_left=known.num_autonomous, dropped_round=dropped
        )

    def end_by_itself(self, key: Key) -> None:
        del self.known[key]
        self.ended.append(key)

    @invariant()
    def every_open_sequence_is_counted_and_nothing_is_left_of_the_ended(self) -> None:
        load = self.engine.load
        assert load.live_sequences == len(self.known)
        assert load.waiting_sequences == sum(k.pending is not None or k.num_autonomous > 0 for k in self.known.values())
        used, total = self.verifier.cache_use()
        assert 0 <= used <= total
        assert used <= sum(len(known.ids) for known in self.known.values())
        if not self.draining:
            assert self.engine.idle == (load.waiting_sequences == 0)

    def teardown(self) -> None:
        for _ in range(2000):
            if not any(known.pending is not None or known.num_autonomous for known in self.known.values()):
                break
            self.one_step()
        else:
            raise AssertionError(f"never answered: {self.known}")
        for key in list(self.known):
            self.end(key)
        assert self.verifier.cache_use()[0] == 0
        assert not self.engine.load.live_sequences


class ShortOfMemory(TargetHistory):
    """As above, but slots run out after admission."""

    num_slots = 64
    headroom = 0


PATIENT = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestTargetHistory = TargetHistory.TestCase
TestTargetHistory.settings = PATIENT
TestShortOfMemory = ShortOfMemory.TestCase
TestShortOfMemory.settings = PATIENT

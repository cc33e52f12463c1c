"""Where the time of a round goes: the parts add up, and nothing is counted that was not waited for."""

from __future__ import annotations

import pytest

from orchestrator.rounds import Exchange, Proposal, RoundPlan
from orchestrator.telemetry import round_clock
from orchestrator.telemetry.round_clock import RoundClock, Split
from specdec.core.rounds import Timings, Verdict


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(round_clock.time, "monotonic", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Target:
    """Takes so long; says that of that so much was pass, sampling and queue."""

    def __init__(self, clock: Clock, seconds: float, verdict: Verdict) -> None:
        self.clock, self.seconds, self.verdict = clock, seconds, verdict

    exchange = Exchange()

    async def verify(self, sequence, tree, plan) -> Verdict:
        self.clock.passes(self.seconds)
        return self.verdict


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def verdict(number: int, **microseconds: int) -> Verdict:
    return Verdict(number, 5, (), 1, Timings(**microseconds))


async def test_the_parts_of_a_round_are_told_apart_and_add_up(clock):
    target = Target(clock, 0.050, verdict(1, queue_us=5_000, pass_us=30_000, sample_us=2_000))
    rounds = RoundClock(target)
    clock.passes(0.010)  # the loop waits for its draft
    _, record = await rounds.verify(None, Proposal(), RoundPlan())
    clock.passes(0.003)
    split = rounds.split(record)
    assert split == Split(
        draft=pytest.approx(0.010),
        network=pytest.approx(0.013),
        queue=pytest.approx(0.005),
        model_pass=pytest.approx(0.030),
        sample=pytest.approx(0.002),
        orchestrator=pytest.approx(0.003),
    )
    assert split.total == pytest.approx(0.063)


async def test_handing_over_is_the_clients_time_and_what_is_done_before_it_is_not(clock):
    target = Target(clock, 0.050, verdict(1))
    rounds = RoundClock(target)
    rounds.split((await rounds.verify(None, Proposal(), RoundPlan()))[1])
    clock.passes(0.001)
    rounds.hands_over()
    clock.passes(2.0)
    rounds.continues()
    clock.passes(0.020)
    split = rounds.split((await rounds.verify(None, Proposal(), RoundPlan()))[1])
    assert (split.client, split.orchestrator, split.draft) == pytest.approx((2.0, 0.001, 0.020))


async def test_an_open_is_told_apart_because_it_has_a_prefill_in_it(clock):
    rounds = RoundClock(Target(clock, 3.0, verdict(0, pass_us=400_000)))
    split = rounds.split((await rounds.verify(None, Proposal(), RoundPlan()))[1])
    assert split == Split(open=pytest.approx(3.0))


async def test_a_pass_that_nobody_waited_for_is_no_part_of_the_round(clock):
    rounds = RoundClock(Target(clock, 0.001, verdict(4, queue_us=9_000, pass_us=30_000, sample_us=2_000)))
    split = rounds.split((await rounds.verify(None, Proposal(), RoundPlan()))[1])
    assert split == Split(model_pass=pytest.approx(0.001))


def test_splits_add_up_part_by_part():
    total = Split(1, 2, 3, 4, 5, 6, 7, 8)
    total.add(Split(10, 20, 30, 40, 50, 60, 70, 80))
    assert total == Split(11, 22, 33, 44, 55, 66, 77, 88)
    assert total.total == 396
    assert len(round_clock.PARTS) == 8

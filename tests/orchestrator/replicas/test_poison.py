"""Which losses count against a request, how much, and when they end it."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.replicas.link import WatchdogFired
from orchestrator.replicas.poison import Losses
from specdec.core.errors import Draining, GivenUp, PassFailed, Preempted, ReplicaLost, SpecdecError


class FakeReplica:
    """A replica of which all processes are dead by now; or none, with ``dead`` false."""

    def __init__(self, dead: bool = True) -> None:
        self.dead = dead

    async def is_dead(self, instance: str, timeout_s: float) -> bool:
        return self.dead


def losses_of(replica: Any, *ends: tuple[SpecdecError, str]) -> Losses:
    """Without a verdict between them. An end: the error, and the process."""
    losses = Losses()
    for error, instance in ends:
        losses.lost(error, replica, instance)
    return losses


async def refused(losses: Losses) -> bool:
    try:
        await losses.refuse()
    except GivenUp:
        return True
    return False


async def test_a_process_crashes_once_however_many_streams_to_it_ended_before() -> None:
    replica: Any = FakeReplica()
    lost = ReplicaLost("it has gone")
    losses = losses_of(replica, *[(lost, "one")] * 3)
    assert not await refused(losses)
    losses.lost(lost, replica, "other")
    assert await refused(losses)


@pytest.mark.parametrize(
    ("error", "in_a_row", "in_all"),
    [(WatchdogFired("no pass", stood_still=True), 2, 4), (PassFailed("a pass failed"), 4, 8)],
    ids=["stood still", "failed pass"],
)
async def test_fewer_losses_in_a_row_than_with_verdicts_between_them_end_a_request(
    error: SpecdecError, in_a_row: int, in_all: int
) -> None:
    replica: Any = FakeReplica(dead=False)
    assert not await refused(losses_of(replica, *[(error, "one")] * (in_a_row - 1)))
    assert await refused(losses_of(replica, *[(error, "one")] * in_a_row))
    losses = Losses()
    for _ in range(in_all):
        assert not await refused(losses)
        losses.answered()
        assert not losses.suspected
        losses.lost(error, replica, "one")
        assert losses.suspected
    assert await refused(losses)


async def test_lost_streams_of_a_process_that_lives_are_no_crash() -> None:
    losses = losses_of(FakeReplica(dead=False), *[(ReplicaLost("reset"), "one")] * 20)
    assert losses.suspected
    assert not await refused(losses)


async def test_a_drain_and_a_preemption_are_no_losses() -> None:
    losses = losses_of(FakeReplica(), *[(error, "one") for error in (Draining("it leaves"), Preempted("no room"))] * 5)
    assert len(losses) == 0
    assert not losses.suspected
    assert not await refused(losses)

"""Replays in good order: oldest first, few at a time, suspects alone."""

from __future__ import annotations

import asyncio

from orchestrator.replicas.replay_gate import PER_REPLICA, ReplayGate


class Crowd:
    """Tasks that enter the gate and stay until they are let go."""

    def __init__(self, gate: ReplayGate) -> None:
        self.gate = gate
        self.entered: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, arrived: float, suspect: bool = False) -> None:
        self._leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, arrived, suspect))
        await asyncio.sleep(0)

    async def _stay(self, name: str, arrived: float, suspect: bool) -> None:
        async with self.gate.turn(arrived, suspect):
            self.entered.append(name)
            await self._leave[name].wait()

    async def go(self, name: str) -> None:
        self._leave[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def test_oldest_first_and_few_at_a_time():
    crowd = Crowd(ReplayGate(lambda: 1))
    for number in range(PER_REPLICA + 2):
        await crowd.come(f"{number}", arrived=100 - number)
    await asyncio.sleep(0)
    assert crowd.entered == [f"{number}" for number in range(PER_REPLICA)]
    await crowd.go("0")
    assert crowd.entered[-1] == f"{PER_REPLICA + 1}", "the one that arrived first"
    await crowd.end()


async def test_suspects_go_one_at_a_time_and_hold_up_nobody_else():
    crowd = Crowd(ReplayGate(lambda: 1))
    await crowd.come("first suspect", arrived=1, suspect=True)
    await crowd.come("second suspect", arrived=2, suspect=True)
    await crowd.come("preempted", arrived=3)
    await asyncio.sleep(0)
    assert crowd.entered == ["first suspect", "preempted"]
    await crowd.go("first suspect")
    assert crowd.entered == ["first suspect", "preempted", "second suspect"]
    await crowd.end()


async def test_a_suspect_that_gives_up_waiting_lets_the_next_one_in():
    crowd = Crowd(ReplayGate(lambda: 1))
    await crowd.come("first", arrived=1, suspect=True)
    await crowd.come("second", arrived=2, suspect=True)
    await crowd.come("third", arrived=3, suspect=True)
    crowd.tasks["second"].cancel()
    await asyncio.sleep(0)
    await crowd.go("first")
    assert crowd.entered == ["first", "third"]
    await crowd.end()


async def test_a_second_replica_lets_more_in_and_who_gives_up_leaves_nothing_behind():
    num_replicas = 1
    crowd = Crowd(ReplayGate(lambda: num_replicas))
    for number in range(3 * PER_REPLICA):
        await crowd.come(f"{number}", arrived=number)
    await asyncio.sleep(0)
    assert len(crowd.entered) == PER_REPLICA
    num_replicas = 2
    crowd.gate.changed()
    await asyncio.sleep(0)
    assert len(crowd.entered) == 2 * PER_REPLICA
    await crowd.end()
    async with crowd.gate.turn(0.0):
        assert crowd.gate._inside == {False: 1, True: 0}


async def test_who_gives_up_just_when_let_in_gives_the_turn_on():
    crowd = Crowd(ReplayGate(lambda: 1))
    for name in ("first", "second", "third"):
        await crowd.come(name, arrived=1, suspect=True)
    crowd._leave["first"].set()
    await asyncio.sleep(0)  # "second" is let in now, and has not run yet
    crowd.tasks["second"].cancel()
    await asyncio.gather(*(crowd.tasks[name] for name in ("first", "second")), return_exceptions=True)
    await asyncio.sleep(0)
    assert crowd.entered == ["first", "third"]
    await crowd.end()

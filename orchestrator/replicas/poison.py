"""The replicas that one request has lost, and when they are too many: the request may be what makes them fail.

Knows losses and the fate of processes; does not know texts, lanes, nor how a sequence is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.replicas.link import WatchdogFired
from orchestrator.replicas.replica import Replica
from specdec.core.errors import Draining, GivenUp, PassFailed, ReplicaLost, SpecdecError

MAX_HARM, MAX_HARM_IN_ALL = 4, 8
_HARM_OF_CRASH, _HARM_OF_FAILED_PASS = 2, 1
"""A request may be the cause of its replicas' failures. Two crashes in a row end it; a failed pass, which its replica
survives, counts half. Progress proves the text so far harmless; with progress in between, twice as much ends it."""

_FATE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss of a replica during this request. With neither flag set, the network may be the cause."""

    replica: Replica
    instance: str
    failed_pass: bool
    stood_still: bool


class Losses:
    """The losses of one request, of any of its replicas."""

    def __init__(self) -> None:
        self._losses: list[_Loss] = []
        self._num_harmless = 0  # losses with a verdict after them

    def __len__(self) -> int:
        return len(self._losses)

    def lost(self, error: SpecdecError, replica: Replica, instance: str) -> None:
        """The sequence ended with ``error`` on this process of the replica. Not every error is a loss."""
        if isinstance(error, ReplicaLost) and not isinstance(error, Draining):
            stood_still = isinstance(error, WatchdogFired) and error.stood_still
            self._losses.append(
                _Loss(replica, instance, failed_pass=isinstance(error, PassFailed), stood_still=stood_still)
            )

    def answered(self) -> None:
        """A verdict has come: no loss so far was due to the present text."""
        self._num_harmless = len(self._losses)

    @property
    def suspected(self) -> bool:
        """Whether a replica was lost since the last verdict: the present text may be the cause."""
        return len(self._losses) > self._num_harmless

    async def refuse(self) -> None:
        """Raises GivenUp after too much harm. A lost stream is a crash only if its process ended, or stood still."""
        recent = self._losses[self._num_harmless :]
        if len(recent) * _HARM_OF_CRASH < MAX_HARM and len(self._losses) * _HARM_OF_CRASH < MAX_HARM_IN_ALL:
            return
        if await _harm(recent) >= MAX_HARM or await _harm(self._losses) >= MAX_HARM_IN_ALL:
            raise GivenUp(f"replicas failed {len(self._losses)} times under this request; it is not tried again")


async def _harm(losses: Iterable[_Loss]) -> int:
    harm = 0
    ended: set[tuple[Replica, str]] = set()  # processes with a lost stream
    for loss in losses:
        if loss.failed_pass:
            harm += _HARM_OF_FAILED_PASS
        elif loss.stood_still:
            harm += _HARM_OF_CRASH
        else:
            ended.add((loss.replica, loss.instance))
    # A process that is dead by now crashed once, even if several streams to it ended before.
    for replica, instance in ended:
        if await replica.is_dead(instance, _FATE_TIMEOUT_S):
            harm += _HARM_OF_CRASH
    return harm

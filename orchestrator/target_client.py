"""One sequence's target: a lane on some replica, and another lane when that one is lost.

Knows replay, the one recovery path: the sequence is opened again, on any replica of the same model, with prompt +
committed ids, and the loop does not notice. A crash, a drain, a preemption and a parked client all lead here.
Refuses to know what a verdict means.
"""

from __future__ import annotations

import time
from contextlib import suppress

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from orchestrator.frames import chunked
from orchestrator.link import Lane
from orchestrator.pool import Pool
from orchestrator.replica import Replica
from orchestrator.sequence import Sequence
from specdec.errors import Draining, NoReplica, OutOfStep, Overloaded, PassFailed, Preempted, ReplicaLost
from specdec.rounds import Round, Verdict
from specdec.tree import TokenTree
from specdec.v1 import target_pb2
from specdec.wire import write_round

MAX_HARM = 4
_HARM_OF_CRASH, _HARM_OF_FAILED_PASS = 2, 1
"""It may be the request that fails its replicas: after two crashes, or four failed passes, it is not tried again."""

_REPLAY = (ReplicaLost, OutOfStep, Preempted, Overloaded)
_FATE_TIMEOUT_S = 1.0
_backoff = wait_random_exponential(multiplier=0.02, max=1.0)


class TargetClient:
    """See orchestrator.decoder.Target. ``async with`` closes the sequence on its replica.

    ``arrived`` (monotonic clock) is the request's, so that a replay keeps its age.
    """

    def __init__(self, pool: Pool, model_digest: str, traceparent: str, wait_s: float, arrived: float) -> None:
        self._pool = pool
        self._model_digest = model_digest
        self._traceparent = traceparent
        self._wait_s = wait_s
        self._arrived = arrived
        self._replica: Replica | None = None
        self._lane: Lane | None = None
        self._instance = ""
        self._round = 0
        self._opened_before = False
        self._num_failed_passes = 0
        self._lost_instances: list[tuple[Replica, str]] = []

    async def __aenter__(self) -> TargetClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.park()

    def park(self) -> None:
        """Give up the lane; the next round opens the sequence again."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    async def verify(self, sequence: Sequence, tree: TokenTree) -> Verdict:
        """The next verdict, from whichever replica gives it; bounded by the request's deadline alone.

        Raises NoReplica if none can be reached, or if too many failed under this request.
        """
        if self._lane is not None:
            self._round += 1
            self._lane.send(write_round(self._lane.sequence, Round(self._round, sequence.base, tree)))
            with suppress(*_REPLAY):
                return await self._answer(self._lane)
        retrying = AsyncRetrying(retry=retry_if_exception_type(_REPLAY), wait=_wait, reraise=True)
        verdict: Verdict = await retrying(self._begin, sequence)
        return verdict

    async def _begin(self, sequence: Sequence) -> Verdict:
        """The first verdict of the sequence on a replica; the first of all, or that of a replay."""
        if not self._opened_before:
            self._opened_before = True
            return await self._answer(await self._open(sequence))
        await self._refuse_poison()
        async with self._pool.replays.turn(self._arrived):
            sequence.statistics.num_replays += 1
            return await self._answer(await self._open(sequence))

    async def _answer(self, lane: Lane) -> Verdict:
        sent = time.monotonic()
        try:
            verdict: Verdict = await lane.receive()
        except _REPLAY as error:
            self._lane = None
            self._remember(error)
            raise
        assert self._replica is not None, "an open lane is some replica's"
        if verdict.round:  # an open's answer has a prefill in it
            self._replica.observe(time.monotonic() - sent)
        self._replica.observe_pass(verdict.timings.pass_us / 1e6)
        return verdict

    async def _open(self, sequence: Sequence) -> Lane:
        """Open the sequence somewhere. Its first verdict is a plain token, whatever the draft proposes."""
        try:
            # A replica that gave the sequence back, full or failing, is asked again only if there is no other.
            self._replica = await self._pool.wait_for_one(self._wait_s, avoid=self._replica)
        except ReplicaLost as error:
            raise NoReplica(str(error)) from error
        self._lane = lane = self._replica.lane()
        self._instance = self._replica.instance
        self._round = 0
        age_ms = int((time.monotonic() - self._arrived) * 1e3)
        lane.open(
            chunked(
                sequence.spec,
                self._model_digest,
                self._traceparent,
                lambda spec, more: target_pb2.TargetOpen(
                    sequence=lane.sequence,
                    spec=spec,
                    more=more,
                    stop_token_ids=sequence.stop_token_ids,
                    request_age_ms=age_ms,
                ),
            )
        )
        return lane

    def _remember(self, error: Exception) -> None:
        if isinstance(error, PassFailed):
            self._num_failed_passes += 1
        elif isinstance(error, ReplicaLost) and not isinstance(error, Draining) and self._replica is not None:
            self._lost_instances.append((self._replica, self._instance))

    async def _refuse_poison(self) -> None:
        """A lost stream is a crash only if the process behind it ended."""
        failed = self._num_failed_passes
        if failed * _HARM_OF_FAILED_PASS + len(self._lost_instances) * _HARM_OF_CRASH < MAX_HARM:
            return
        crashes = sum([await replica.is_dead(each, _FATE_TIMEOUT_S) for replica, each in self._lost_instances])
        if failed * _HARM_OF_FAILED_PASS + crashes * _HARM_OF_CRASH >= MAX_HARM:
            raise NoReplica(
                f"{crashes} replicas crashed and {failed} passes failed under this request; it is not tried again"
            )


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after_s if isinstance(error, Overloaded) else _backoff(state)

"""One sequence's target: a lane on some replica, and another lane when that one is lost.

Knows replay, the one recovery path: the sequence is opened again, on any replica of the same model, with prompt +
committed ids, and the loop does not notice. Refuses to know what a verdict means.
"""

from __future__ import annotations

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from orchestrator.frames import chunked
from orchestrator.link import Lane
from orchestrator.pool import Pool, Replica
from orchestrator.sequence import Sequence
from specdec.errors import NoReplica, OutOfStep, Overloaded, Preempted, ReplicaLost
from specdec.rounds import Round, Verdict
from specdec.tree import TokenTree
from specdec.v1 import target_pb2
from specdec.wire import write_round

_REPLAY = (ReplicaLost, OutOfStep, Preempted, Overloaded)
_backoff = wait_random_exponential(multiplier=0.02, max=1.0)


class TargetClient:
    """See orchestrator.decoder.Target. ``async with`` closes the sequence on its replica."""

    def __init__(self, pool: Pool, model_digest: str, traceparent: str, wait_s: float) -> None:
        self._pool = pool
        self._model_digest = model_digest
        self._traceparent = traceparent
        self._wait_s = wait_s
        self._lane: Lane | None = None
        self._replica: Replica | None = None  # where the sequence is, or was last
        self._round = 0

    async def __aenter__(self) -> TargetClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._lane is not None:
            self._lane.close()

    async def verify(self, sequence: Sequence, tree: TokenTree) -> Verdict:
        """The next verdict, from whichever replica gives it; bounded by the request's deadline alone."""
        async for attempt in AsyncRetrying(retry=retry_if_exception_type(_REPLAY), wait=_wait, reraise=True):
            with attempt:
                if self._lane is None:
                    lane = await self._open(sequence)
                else:
                    lane = self._lane
                    self._round += 1
                    lane.send(write_round(lane.sequence, Round(self._round, sequence.base, tree)))
                try:
                    verdict: Verdict = await lane.receive()
                except _REPLAY:
                    self._lane = None
                    sequence.statistics.num_replays += 1
                    raise
                return verdict
        raise AssertionError("unreachable: retrying ends by a verdict or an error")

    async def _open(self, sequence: Sequence) -> Lane:
        """Open the sequence somewhere. Its first verdict is a plain token, whatever the draft proposes."""
        try:
            # A replica that gave the sequence back, full or failing, is asked again only if there is no other.
            self._replica = replica = await self._pool.wait_for_one(self._wait_s, avoid=self._replica)
        except ReplicaLost as error:
            raise NoReplica(str(error)) from error
        self._lane = lane = replica.lane()
        self._round = 0
        lane.open(
            chunked(
                sequence.spec,
                self._model_digest,
                self._traceparent,
                lambda spec, more: target_pb2.TargetOpen(
                    sequence=lane.sequence, spec=spec, more=more, stop_token_ids=sequence.stop_token_ids
                ),
            )
        )
        return lane


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after_s if isinstance(error, Overloaded) else _backoff(state)

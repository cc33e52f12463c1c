"""One sequence's target: a lane on some replica, and another lane when that one is lost.

Knows replay, the one recovery path: the sequence is opened again, on any replica of the same model, with prompt +
committed ids, and the loop does not notice. A crash, a drain, a preemption and a parked client all lead here.
Refuses to know what a verdict means.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from orchestrator.control.costs import Costs
from orchestrator.replicas.frames import chunked
from orchestrator.replicas.link import HostileReplica, Lane, WatchdogFired
from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Replica
from orchestrator.rounds import Early
from orchestrator.sequence import Sequence
from specdec.core.errors import (
    Draining,
    NoReplica,
    OutOfStep,
    Overloaded,
    PassFailed,
    Preempted,
    ReplicaLost,
    SpecdecError,
)
from specdec.core.rounds import EARLY, OVERRUN, RUN_ON, Round, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.transport.wire import write_round
from specdec.v1 import target_pb2

MAX_HARM, MAX_HARM_IN_ALL = 4, 8
_HARM_OF_CRASH, _HARM_OF_FAILED_PASS = 2, 1
"""It may be the request that fails its replicas. Two crashes in a row end it; a failed pass, which leaves its replica
alive, counts half. In all, also with progress in between, which shows that the text so far is harmless, twice that."""

_REPLAY = (ReplicaLost, OutOfStep, Preempted, Overloaded)
_FATE_TIMEOUT_S = 1.0
_SHORTEST_PAUSE_S = 0.02
_backoff = wait_random_exponential(multiplier=0.02, max=1.0)


@dataclass(frozen=True, slots=True)
class _Loss:
    """Of a replica under this request. If it did not fail or stand still in a pass it may have been the network."""

    replica: Replica
    instance: str
    failed_pass: bool
    stood_still: bool


class TargetClient:
    """See orchestrator.decoder.Target. ``async with`` closes the sequence on its replica.

    ``arrived`` (monotonic clock) is the request's, so that a replay keeps its age.
    """

    def __init__(
        self, pool: Pool, costs: Costs, model_digest: str, traceparent: str, wait_s: float, arrived: float
    ) -> None:
        self._pool = pool
        self._costs = costs
        self._model_digest = model_digest
        self._traceparent = traceparent
        self._wait_s = wait_s
        self._arrived = arrived
        self._replica: Replica | None = None
        self._lane: Lane | None = None
        self._instance = ""
        self._round = 0
        self._answered = 0  # of the rounds, the last one that a verdict came of
        self._rounds: list[Round] = []  # that more verdicts may come of: the last one, and one that it supersedes
        self._num_passes = 0  # of the replica, at the last verdict
        self._opened_before = False
        self._cause = ""  # of the next replay
        self._refused = False  # the last attempt found no room, and so was none
        self._num_preemptions = 0
        self._losses: list[_Loss] = []
        self._num_harmless = 0  # of them: a verdict came after

    async def __aenter__(self) -> TargetClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.park()
        self._pool.waiting_for_room.discard(self)

    def park(self) -> None:
        """Give up the lane; the next round opens the sequence again."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None
            self._cause = "PARKED"

    async def verify(self, sequence: Sequence, tree: TokenTree, run_on: int = 0, early: Early | None = None) -> Verdict:
        """The next verdict, from whichever replica gives it; bounded by the request's deadline alone.

        Raises NoReplica if none can be reached, or if too many failed under this request.
        """
        if self._lane is not None and self._lane.lost and not self._rounds:
            self.park()  # nothing of it was unanswered, so it cannot be what ended the replica: no suspect
            self._cause = "REPLICA_LOST"
        if self._lane is not None:
            with suppress(*_REPLAY):
                return await self._next(self._lane, sequence, tree, run_on, early)
        retrying = AsyncRetrying(retry=retry_if_exception_type(_REPLAY), wait=_wait, reraise=True)
        verdict: Verdict = await retrying(self._begin, sequence)
        return verdict

    async def _next(self, lane: Lane, sequence: Sequence, tree: TokenTree, run_on: int, early: Early | None) -> Verdict:
        under_way = bool(self._rounds and self._rounds[-1].tree)
        if under_way or not self._rounds:
            if not under_way:
                self._ask(lane, Round(self._round + 1, sequence.base, tree, run_on if self._can(RUN_ON) else 0))
            asked = lane.heard if under_way else time.monotonic()
            await self._send_early(lane, sequence, early, asked + self._costs.early_s(len(tree), under_way))
            return await self._answer(lane, sequence, tree, asked, under_way)
        to_come = _to_come(self._rounds[-1], sequence.base)
        # Before the target rests: to be asked again would cost it a pass where others are in every one.
        if self._answered == self._round and (2 * to_come <= run_on or run_on + OVERRUN < to_come):
            self._ask(lane, Round(self._round + 1, sequence.base, EMPTY_TREE, run_on))
        return await self._answer(lane, sequence)

    async def _send_early(self, lane: Lane, sequence: Sequence, early: Early | None, at: float) -> None:
        """The round after the one that the target is in, unless the verdict comes before it is time."""
        if early is None or not self._can(EARLY) or await lane.arrives(at - time.monotonic()):
            return
        tree, max_nodes = early()
        if tree:
            self._ask(lane, Round(self._round + 1, sequence.base, tree, max_nodes=max_nodes))

    def _can(self, capability: str) -> bool:
        return self._replica is not None and self._replica.can(frozenset({capability}))

    def _ask(self, lane: Lane, round_: Round) -> None:
        self._round = round_.number
        self._rounds.append(round_)
        lane.send(write_round(lane.sequence, round_))

    async def _begin(self, sequence: Sequence) -> Verdict:
        """The first verdict of the sequence on a replica; the first of all, or that of a replay."""
        if self._opened_before:
            await self._refuse_poison()
        try:
            # Before a turn is taken: who waits for a replica must not keep others from waiting, too.
            replica = await self._pool.wait_for_one(self._wait_s, self._replica, sequence.needs, sequence.base)
        except ReplicaLost as error:
            raise NoReplica(str(error)) from error
        if not self._opened_before:
            self._opened_before = True
            return await self._first_answer(sequence, replica)
        async with self._pool.replays.turn(self._arrived, suspect=self._suspect):
            # There may be another by now, or none. Who gave the sequence back is asked only if there is no other.
            replica = await self._pool.wait_for_one(0.0, self._replica, sequence.needs, sequence.base)
            if not self._refused:
                sequence.statistics.replayed(self._cause, sequence.base)
            return await self._first_answer(sequence, replica)

    async def _first_answer(self, sequence: Sequence, replica: Replica) -> Verdict:
        self._replica = replica
        lane = self._open(sequence, replica)
        self._rounds = [Round(0, sequence.base)]
        return await self._answer(lane, sequence)

    async def _answer(
        self,
        lane: Lane,
        sequence: Sequence,
        tree: TokenTree = EMPTY_TREE,
        asked: float | None = None,
        under_way: bool = False,
    ) -> Verdict:
        """On ``tree``, which may be what is left of the one that was sent. ``asked``: when, unless the target went on
        by itself; ``under_way``: before the verdict before, which that is the time of."""
        try:
            verdict = self._checked(await lane.receive(), sequence, tree)
        except _REPLAY as error:
            self._lane = None
            self._rounds = []
            self._remember(error)
            raise
        self._pool.waiting_for_room.discard(self)
        assert self._replica is not None, "an open lane is some replica's"
        self._num_harmless, self._refused = len(self._losses), False
        num_passes, self._num_passes = self._replica.num_passes - self._num_passes, self._replica.num_passes
        everybody, timings = self._replica.num_sequences, verdict.timings
        if asked is not None:
            latency_s = lane.heard - asked
            self._replica.observe(latency_s)
            self._costs.verified(len(tree), latency_s, timings, num_passes, everybody, under_way)
        elif verdict.round:  # an open's answer has a prefill in it
            # When it came tells nothing of how long one waits here.
            self._replica.answered()
            self._costs.went_on(timings, everybody)
        self._replica.observe_pass(timings.pass_us / 1e6)
        if not (self._rounds and self._rounds[-1].number > verdict.round):
            return verdict
        later = self._rounds[-1]
        if later.tree:
            committed = [*(tree.token_ids[node] for node in verdict.accepted), verdict.next_token]
            return replace(verdict, under_way=later.tree.descend(committed).prefix(later.max_nodes))
        return replace(verdict, run_on=_to_come(later, verdict.base + 1))  # which supersedes this one

    def _open(self, sequence: Sequence, replica: Replica) -> Lane:
        """Open the sequence there. Its first verdict is a plain token, whatever the draft proposes."""
        self._lane = lane = replica.lane()
        self._instance = replica.instance
        self._round = self._answered = 0
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
                    num_preemptions=self._num_preemptions,
                ),
            )
        )
        return lane

    def _checked(self, verdict: Verdict, sequence: Sequence, tree: TokenTree) -> Verdict:
        """The verdict on ``tree``, whose nodes the accepted ones are now. What it answers is answered.

        A target that answers what cannot be is left by everyone; this sequence is replayed elsewhere.
        """
        round_ = next((round_ for round_ in self._rounds if round_.number == verdict.round), None)
        later = [each for each in self._rounds if each.number > verdict.round]
        if round_ is None or verdict.base != sequence.base:
            expected = " or ".join(str(round_.number) for round_ in self._rounds)
            nonsense = f"round {verdict.round} at base {verdict.base} for {expected} at {sequence.base}"
        elif (accepted := _accepted(round_, verdict, sequence.ids[round_.base :], tree)) is None:
            nonsense = f"accepted nodes {verdict.accepted}, which are no path of the tree it was sent"
        elif verdict.run_on > round_.run_on:
            nonsense = f"{verdict.run_on} tokens to come unasked where {round_.run_on} were allowed"
        elif verdict.dropped and [verdict.dropped] != [each.number for each in later if each.tree]:
            nonsense = f"round {verdict.dropped} dropped, which was not sent early"
        else:
            if verdict.dropped:
                later, self._round = [], verdict.round
            base = verdict.base + len(verdict.accepted) + 1
            goes_on = [Round(round_.number, base, run_on=verdict.run_on - 1)] if verdict.run_on else []
            self._rounds = [*goes_on, *later]
            self._answered = verdict.round
            return verdict if accepted == verdict.accepted else replace(verdict, accepted=accepted)
        error = HostileReplica(f"the target answered nonsense: {nonsense}")
        if self._replica is not None:
            self._replica.eject(str(error))
        self.park()
        raise error

    @property
    def _suspect(self) -> bool:
        """A replica was lost under this text, as it is now."""
        return len(self._losses) > self._num_harmless

    def _remember(self, error: SpecdecError) -> None:
        self._cause = error.reason
        self._refused = isinstance(error, Overloaded)
        if self._refused and self._replica is not None:
            self._replica.num_refused += 1
            self._pool.waiting_for_room.add(self)
        self._num_preemptions += isinstance(error, Preempted)
        if isinstance(error, ReplicaLost) and not isinstance(error, Draining) and self._replica is not None:
            stood_still = isinstance(error, WatchdogFired) and error.stood_still
            self._losses.append(_Loss(self._replica, self._instance, isinstance(error, PassFailed), stood_still))

    async def _refuse_poison(self) -> None:
        """A lost stream is a crash only if the process behind it ended, or stood still in a pass."""
        recent = self._losses[self._num_harmless :]
        if len(recent) * _HARM_OF_CRASH < MAX_HARM and len(self._losses) * _HARM_OF_CRASH < MAX_HARM_IN_ALL:
            return
        if await _harm(recent) >= MAX_HARM or await _harm(self._losses) >= MAX_HARM_IN_ALL:
            raise NoReplica(f"replicas failed {len(self._losses)} times under this request; it is not tried again")


def _accepted(round_: Round, verdict: Verdict, since: Seq[int], tree: TokenTree) -> tuple[int, ...] | None:
    """The accepted nodes of the round's tree as nodes of ``tree``, which is left of it now that ``since`` is committed.
    None: they are no path there."""
    above = round_.tree.trace(since)
    if (len(above) < len(since) and verdict.accepted) or not round_.tree.is_path((*above, *verdict.accepted)):
        return None
    nodes = tree.trace([round_.tree.token_ids[node] for node in verdict.accepted])
    return tuple(nodes) if len(nodes) == len(verdict.accepted) else None


def _to_come(round_: Round, base: int) -> int:
    """Verdicts that are still to come of a round at ``base``."""
    return 1 + max(0, round_.run_on - (base - round_.base))


async def _harm(losses: Iterable[_Loss]) -> int:
    harm = 0
    ended: set[tuple[Replica, str]] = set()  # streams of these processes
    for loss in losses:
        if loss.failed_pass:
            harm += _HARM_OF_FAILED_PASS
        elif loss.stood_still:
            harm += _HARM_OF_CRASH
        else:
            ended.add((loss.replica, loss.instance))
    # A process that is dead by now crashed once, however many streams to it had ended before.
    for replica, instance in ended:
        if await replica.is_dead(instance, _FATE_TIMEOUT_S):
            harm += _HARM_OF_CRASH
    return harm


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return max(error.retry_after_s, _SHORTEST_PAUSE_S) if isinstance(error, Overloaded) else _backoff(state)

"""The target of one sequence: a lane on some replica, and another lane when that one is lost.

Knows replay, the one recovery path: the sequence is opened again, on any replica of the same model, with prompt +
committed ids, and the loop does not notice. A crash, a drain, a preemption and a parked client all use it.
Does not know what a verdict means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from orchestrator.replicas import allowances
from orchestrator.replicas.lane import Lane
from orchestrator.replicas.link import HostileReplica
from orchestrator.replicas.poison import Losses
from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Replica
from orchestrator.rounds import Exchange, RoundPlan
from orchestrator.sequence import Sequence
from orchestrator.verifying.rounds_in_flight import RoundsInFlight
from specdec.core.errors import OutOfStep, Overloaded, Preempted, ReplicaLost, SpecdecError
from specdec.core.rounds import AUTONOMOUS, EARLY, SELF_DRAFT, PromptLogprobs, Round, TargetOpen, Verdict
from specdec.core.sequence import Priority
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.transport.opening import target_open
from specdec.transport.wire import write_round

_REPLAY = (ReplicaLost, OutOfStep, Preempted, Overloaded)
_MIN_PAUSE_S = 0.02
_PLAIN = RoundPlan()
_backoff = wait_random_exponential(multiplier=0.02, max=1.0)


class TargetClient:
    """The side of orchestrator.decoder.Target that talks to replicas. ``async with`` closes the sequence there.

    ``arrived``: arrival time of the request (monotonic clock), so that a replay keeps its age. ``next_round`` makes the
    next round before the verdict on this one (see orchestrator.drafting.speculation.Speculation.next_round).
    ``wanted_self_draft_nodes``: nodes of a tree that a target drafts itself, if it can.
    """

    def __init__(
        self,
        pool: Pool,
        model_digest: str,
        traceparent: str,
        wait_s: float,
        arrived: float,
        next_round: Callable[[Sequence], tuple[TokenTree, int]] | None = None,
        wanted_self_draft_nodes: int = 0,
    ) -> None:
        self._pool = pool
        self._model_digest = model_digest
        self._traceparent = traceparent
        self._wait_s = wait_s
        self._arrived = arrived
        self._next_round = next_round
        self._wanted_self_draft_nodes = wanted_self_draft_nodes
        self._max_self_draft_nodes = 0  # with this replica
        self.exchange = Exchange()
        """What the last verdict took."""
        self._overhead_s = 0.0  # of the last round that was not pipelined
        self._replica: Replica | None = None
        self._lane: Lane | None = None
        self._instance = ""
        self._rounds = RoundsInFlight()
        self._opened_before = False
        self._cause = ""  # of the next replay
        self._refused = False  # the last attempt had no room; it does not count as a replay
        self._num_preemptions = 0
        self._losses = Losses()

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

    async def verify(self, sequence: Sequence, tree: TokenTree, plan: RoundPlan = _PLAIN) -> Verdict:
        """The next verdict, from any replica; only the request's deadline limits the time.

        Allows the autonomous tokens and the self-drafts of the plan. Sends the next round as early as it says, unless
        the verdict comes before that.

        Raises NoReplica if no replica can be reached, GivenUp if too many failed under this request.
        """
        if self._lane is not None and self._lane.lost and not self._rounds.pending:
            self.park()  # no round was unanswered, so this sequence did not end the replica: no suspect
            self._cause = "REPLICA_LOST"
        if self._lane is not None:
            with suppress(*_REPLAY):
                return await self._continue(self._lane, sequence, tree, plan=plan)
        retrying = AsyncRetrying(retry=retry_if_exception_type(_REPLAY), wait=_wait, reraise=True)
        verdict: Verdict = await retrying(self._begin, sequence)
        return verdict

    async def _continue(self, lane: Lane, sequence: Sequence, tree: TokenTree, *, plan: RoundPlan) -> Verdict:
        """The next verdict of an open sequence."""
        num_autonomous, self_draft_nodes = plan.num_autonomous, min(plan.self_draft_nodes, self._max_self_draft_nodes)
        if self._rounds.num_autonomous_left(sequence.base):
            if self._rounds.renews(sequence.base, num_autonomous):
                number = self._rounds.sent + 1
                renewal = Round(number, sequence.base, num_autonomous=num_autonomous, self_draft_nodes=self_draft_nodes)
                self._send(lane, sequence, renewal)
            return await self._answer(lane, sequence)
        pipelined = self._rounds.pipelined
        if not pipelined:
            round_ = Round(
                number=self._rounds.sent + 1,
                base=sequence.base,
                tree=tree,
                num_autonomous=num_autonomous if self._can(AUTONOMOUS) else 0,
                self_draft_nodes=self_draft_nodes,
            )
            self._send(lane, sequence, round_)
        started = lane.heard if pipelined else time.monotonic()
        if plan.next_round_after_s is not None:
            one_way_s = self._overhead_s if pipelined else 0.0
            await self._send_early(lane, sequence, at=started + plan.next_round_after_s - one_way_s)
        return await self._answer(lane, sequence, tree, started=started, pipelined=pipelined)

    async def _send_early(self, lane: Lane, sequence: Sequence, at: float) -> None:
        """Send the next round early, at the time ``at``, unless the verdict comes before that."""
        if self._next_round is None or not self._can(EARLY) or await lane.arrives(at - time.monotonic()):
            return
        tree, max_nodes = self._next_round(sequence)
        if tree:
            self._send(lane, sequence, Round(self._rounds.sent + 1, sequence.base, tree, max_nodes=max_nodes))

    def _can(self, capability: str) -> bool:
        return self._replica is not None and self._replica.can(frozenset({capability}))

    def _send(self, lane: Lane, sequence: Sequence, round_: Round) -> None:
        self._rounds = self._rounds.after_round(round_)
        num_entries = allowances.of_round(round_, sequence.request.output.num_logprobs)
        lane.send(write_round(lane.sequence, round_), num_entries)

    async def _begin(self, sequence: Sequence) -> Verdict:
        """The first verdict of the sequence on a new replica: the first of all, or that of a replay."""
        if self._opened_before:
            await self._losses.refuse()
        needs, prefixes = sequence.request.needs, sequence.request.prefixes
        # Wait before taking a turn: a sequence without a replica must not block the turns of others.
        replica = await self._pool.wait_for_one(
            self._wait_s, avoid=self._replica, needs=needs, num_tokens=sequence.base, prefixes=prefixes
        )
        if not self._opened_before:
            self._opened_before = True
            return await self._first_answer(sequence, replica)
        due = self._arrived + sequence.request.priority.behind_s
        async with self._pool.replays.turn(due, suspect=self._losses.suspected):
            # Choose again: replicas may have come or gone. The last replica is used only if there is no other.
            if (chosen := self._pool.pick(self._replica, needs, sequence.base, prefixes=prefixes)) is None:
                raise ReplicaLost("no target is ready any more")
            if not self._refused:
                sequence.statistics.replayed(self._cause, sequence.base)
            return await self._first_answer(sequence, chosen)

    async def _first_answer(self, sequence: Sequence, replica: Replica) -> Verdict:
        return await self._answer(self._open(sequence, replica), sequence)

    def _open(self, sequence: Sequence, replica: Replica) -> Lane:
        """Open the sequence there. Its first verdict is a plain token, without draft tokens."""
        self._replica = replica
        self._lane = lane = replica.lane()
        self._pool.count_open(replica, sequence.request.prefixes)
        self._instance = replica.instance
        self._rounds = RoundsInFlight.opened(sequence.base)
        self._max_self_draft_nodes = self._wanted_self_draft_nodes if self._can(SELF_DRAFT) else 0
        num_logprobs = sequence.request.output.num_logprobs
        num_prompt_logprobs = sequence.num_prompt_logprobs if sequence.lacks_prompt_logprobs else None
        open_ = TargetOpen(
            spec=sequence.spec,
            stop_token_ids=sequence.request.stops.token_ids,
            age_s=time.monotonic() - self._arrived,
            num_preemptions=self._num_preemptions,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            max_self_draft_nodes=self._max_self_draft_nodes,
            adapter=sequence.request.adapter,
        )
        lane.open(
            target_open(lane.sequence, open_, self._model_digest, traceparent=self._traceparent),
            allowances.of_round(Round(0, sequence.base), num_logprobs)
            + allowances.of_prompt(sequence.num_prompt_tokens, num_prompt_logprobs),
        )
        return lane

    async def _answer(
        self,
        lane: Lane,
        sequence: Sequence,
        tree: TokenTree = EMPTY_TREE,
        *,
        started: float | None = None,
        pipelined: bool = False,
    ) -> Verdict:
        """The next verdict, on ``tree``: the tree sent, or what is left of it. ``started``: start of the round; None:
        an autonomous verdict, or an open. ``pipelined``: the round was sent early, and starts at the last verdict."""
        try:
            verdict = self._checked(await self._receive(lane, sequence), sequence, tree)
        except _REPLAY as error:
            self._lane = None
            self._rounds = RoundsInFlight()
            self._remember(error)
            raise
        self._pool.waiting_for_room.discard(self)
        self._losses.answered()
        self._refused = False
        latency_s = lane.heard - started if started is not None else None
        self._observe(verdict, latency_s, pipelined=pipelined, priority=sequence.request.priority)
        return self._rounds.with_num_left(verdict)

    async def _receive(self, lane: Lane, sequence: Sequence) -> Verdict:
        while isinstance(result := await lane.receive(), PromptLogprobs):
            if not sequence.add_prompt_logprobs(result):
                self._refuse("logprobs of the prompt that were not requested, or not the next ones")
        verdict: Verdict = result
        return verdict

    def _observe(self, verdict: Verdict, latency_s: float | None, *, pipelined: bool, priority: Priority) -> None:
        assert self._replica is not None, "an open lane is some replica's"
        timings = verdict.timings
        if not verdict.round:
            self._replica.prefixes.num_tokens += verdict.base
            self._replica.prefixes.num_cached_tokens += min(verdict.num_cached_tokens, verdict.base)
        self.exchange = Exchange(round_trip_s=latency_s, pipelined=pipelined, num_live=self._replica.num_sequences)
        if latency_s is not None:
            # A batch request waits for passes while others do not: that is no fault of the replica.
            queue_s = timings.queue_us / 1e6 if priority is Priority.BATCH else 0.0
            self._replica.observe_latency(max(0.0, latency_s - queue_s))
            if not pipelined:
                self._overhead_s = latency_s - (timings.queue_us + timings.pass_us + timings.sample_us) / 1e6
        elif verdict.round:
            # The arrival of an autonomous verdict shows nothing of the replica's latency.
            self._replica.count_answer()
        self._replica.observe_pass(timings.pass_us / 1e6)

    def _checked(self, verdict: Verdict, sequence: Sequence, tree: TokenTree) -> Verdict:
        """The verdict with its accepted nodes as nodes of ``tree``. Marks the round as answered.

        A target that sends an invalid verdict is ejected, and this sequence is replayed elsewhere.
        """
        accepted = self._rounds.accepted_nodes(verdict, sequence, tree)
        if (problem := self._rounds.problem(verdict, sequence, accepted)) or accepted is None:
            self._refuse(problem)
        self._rounds = self._rounds.after_verdict(verdict)
        return verdict if accepted == verdict.accepted else replace(verdict, accepted=accepted)

    def _refuse(self, problem: str) -> NoReturn:
        error = HostileReplica(f"the target sent an invalid verdict: {problem}")
        if self._replica is not None:
            self._replica.eject(str(error))
        self.park()
        raise error

    def _remember(self, error: SpecdecError) -> None:
        self._cause = error.reason
        self._refused = isinstance(error, Overloaded)
        self._num_preemptions += isinstance(error, Preempted)
        if self._replica is None:
            return
        if self._refused:
            self._replica.num_refused += 1
            self._pool.waiting_for_room.add(self)
        self._losses.lost(error, self._replica, self._instance)


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return max(error.retry_after_s, _MIN_PAUSE_S) if isinstance(error, Overloaded) else _backoff(state)

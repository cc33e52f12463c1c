"""The target of one sequence: a lane on some replica, and another lane when that one is lost.

Knows replay, the one recovery path: the sequence is opened again, on any replica of the same model, with prompt +
committed ids, and the loop does not notice. A crash, a drain, a preemption and a parked client all use it.
Does not know what a verdict means.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from orchestrator.replicas import allowances
from orchestrator.replicas.allowances import of_round
from orchestrator.replicas.lane import Lane
from orchestrator.replicas.link import HostileReplica
from orchestrator.replicas.opening import target_open
from orchestrator.replicas.poison import Losses
from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Replica
from orchestrator.rounds import Exchange
from orchestrator.sequence import Sequence
from specdec.core.errors import OutOfStep, Overloaded, Preempted, ReplicaLost, SpecdecError
from specdec.core.rounds import AUTONOMOUS, EARLY, OVERRUN, SELF_DRAFT, PromptLogprobs, Round, TargetOpen, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.transport.wire import write_round

_REPLAY = (ReplicaLost, OutOfStep, Preempted, Overloaded)
_SHORTEST_PAUSE_S = 0.02
_backoff = wait_random_exponential(multiplier=0.02, max=1.0)


class TargetClient:
    """The side of orchestrator.decoder.Target that talks to replicas. ``async with`` closes the sequence there.

    ``arrived``: arrival time of the request (monotonic clock), so that a replay keeps its age. ``next_round`` makes the
    next round before the verdict on this one (see orchestrator.drafting.speculation.Speculation.next_round).
    ``wanted_self_draft_nodes``: nodes of a tree that a target with a head drafts itself.
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
        self._wanted_self_draft_nodes, self._max_self_draft_nodes = (
            wanted_self_draft_nodes,
            0,
        )  # nodes of self-drafts: wanted, and possible with this replica
        self._pool = pool
        self._model_digest = model_digest
        self._traceparent = traceparent
        self._wait_s = wait_s
        self._arrived = arrived
        self._next_round = next_round
        self.exchange = Exchange()
        """What the last verdict took."""
        self._overhead_s = 0.0  # of the last round that was not pipelined
        self._replica: Replica | None = None
        self._lane: Lane | None = None
        self._instance = ""
        self._round = 0
        self._answered = 0  # number of the last round with a verdict
        self._rounds: list[Round] = []  # rounds that still get verdicts: the last one, and one that it supersedes
        self._opened_before = False
        self._cause = ""  # of the next replay
        self._refused = False  # the last attempt found no room; it does not count as a replay
        self._num_preemptions = 0
        self._num_logprobs: int | None = None
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

    async def verify(
        self,
        sequence: Sequence,
        tree: TokenTree,
        num_autonomous: int = 0,
        next_round_after_s: float | None = None,
        self_draft_nodes: int = 0,
    ) -> Verdict:
        """The next verdict, from any replica; only the request's deadline limits the time.

        Allows ``num_autonomous`` autonomous tokens after it, and ``self_draft_nodes`` nodes of self-drafts. Sends
        the next round ``next_round_after_s`` after this one, unless the verdict comes before that.

        Raises NoReplica if no replica can be reached, GivenUp if too many failed under this request.
        """
        if self._lane is not None and self._lane.lost and not self._rounds:
            self.park()  # no round was unanswered, so this sequence did not end the replica: no suspect
            self._cause = "REPLICA_LOST"
        if self._lane is not None:
            with suppress(*_REPLAY):
                self_draft_nodes = min(self_draft_nodes, self._max_self_draft_nodes)
                return await self._next(
                    self._lane, sequence, tree, num_autonomous, next_round_after_s, self_draft_nodes
                )
        retrying = AsyncRetrying(retry=retry_if_exception_type(_REPLAY), wait=_wait, reraise=True)
        verdict: Verdict = await retrying(self._begin, sequence)
        return verdict

    async def _next(
        self,
        lane: Lane,
        sequence: Sequence,
        tree: TokenTree,
        num_autonomous: int,
        next_round_after_s: float | None,
        self_draft_nodes: int,
    ) -> Verdict:
        pipelined = bool(self._rounds and self._rounds[-1].tree)
        if pipelined or not self._rounds:
            if not pipelined:
                allowed = num_autonomous if self._can(AUTONOMOUS) else 0
                self._ask(lane, Round(self._round + 1, sequence.base, tree, allowed, self_draft_nodes=self_draft_nodes))
            asked = lane.heard if pipelined else time.monotonic()
            if next_round_after_s is not None:
                way_s = self._overhead_s if pipelined else 0.0
                await self._send_early(lane, sequence, asked + next_round_after_s - way_s)
            return await self._answer(lane, sequence, tree, asked, pipelined)
        to_come = _to_come(self._rounds[-1], sequence.base)
        # Renew the allowance before it runs out: a sequence that pauses misses a pass that the others are in.
        if self._answered == self._round and (2 * to_come <= num_autonomous or num_autonomous + OVERRUN < to_come):
            self._ask(
                lane,
                Round(self._round + 1, sequence.base, EMPTY_TREE, num_autonomous, self_draft_nodes=self_draft_nodes),
            )
        return await self._answer(lane, sequence)

    async def _send_early(self, lane: Lane, sequence: Sequence, at: float) -> None:
        """Send the next round early, at the time ``at``, unless the verdict comes before that."""
        if self._next_round is None or not self._can(EARLY) or await lane.arrives(at - time.monotonic()):
            return
        tree, max_nodes = self._next_round(sequence)
        if tree:
            self._ask(lane, Round(self._round + 1, sequence.base, tree, max_nodes=max_nodes))

    def _can(self, capability: str) -> bool:
        return self._replica is not None and self._replica.can(frozenset({capability}))

    def _ask(self, lane: Lane, round_: Round) -> None:
        self._round = round_.number
        self._rounds.append(round_)
        lane.send(write_round(lane.sequence, round_), of_round(round_, self._num_logprobs))

    async def _begin(self, sequence: Sequence) -> Verdict:
        """The first verdict of the sequence on a new replica: the first of all, or that of a replay."""
        if self._opened_before:
            await self._losses.refuse()
        # Wait before taking a turn: a sequence without a replica must not block the turns of others.
        replica = await self._pool.wait_for_one(self._wait_s, self._replica, sequence.needs, sequence.base)
        if not self._opened_before:
            self._opened_before = True
            return await self._first_answer(sequence, replica)
        async with self._pool.replays.turn(self._arrived, suspect=self._losses.suspected):
            # Choose again: replicas may have come or gone. The last replica is used only if there is no other.
            if (chosen := self._pool.pick(self._replica, sequence.needs, sequence.base)) is None:
                raise ReplicaLost("no target is ready any more")
            if not self._refused:
                sequence.statistics.replayed(self._cause, sequence.base)
            return await self._first_answer(sequence, chosen)

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
        pipelined: bool = False,
    ) -> Verdict:
        """The next verdict, on ``tree``: the tree sent, or what is left of it. ``asked``: start of the round; None: an
        autonomous verdict, or an open. ``pipelined``: the round was sent early, and starts at the last verdict."""
        try:
            while isinstance(result := await lane.receive(), PromptLogprobs):
                if not sequence.take_prompt_logprobs(result):
                    self._refuse("logprobs of the prompt that were not requested, or not the next ones")
            verdict = self._checked(result, sequence, tree)
        except _REPLAY as error:
            self._lane = None
            self._rounds = []
            self._remember(error)
            raise
        self._pool.waiting_for_room.discard(self)
        assert self._replica is not None, "an open lane is some replica's"
        self._losses.answered()
        self._refused = False
        timings, latency_s = verdict.timings, lane.heard - asked if asked is not None else None
        self.exchange = Exchange(latency_s, pipelined, self._replica.num_sequences)
        if latency_s is not None:
            self._replica.observe(latency_s)
            if not pipelined:
                self._overhead_s = latency_s - (timings.queue_us + timings.pass_us + timings.sample_us) / 1e6
        elif verdict.round:
            # The arrival of an autonomous verdict tells nothing of the replica's latency.
            self._replica.answered()
        self._replica.observe_pass(timings.pass_us / 1e6)
        later = self._rounds[-1] if self._rounds else None
        if later is None or later.number <= verdict.round or later.tree:
            return verdict
        return replace(
            verdict, num_autonomous_left=_to_come(later, verdict.base + 1)
        )  # the later round supersedes this one

    def _open(self, sequence: Sequence, replica: Replica) -> Lane:
        """Open the sequence there. Its first verdict is a plain token, without draft tokens."""
        self._lane = lane = replica.lane()
        self._instance = replica.instance
        self._round = self._answered = 0
        self._num_logprobs = sequence.num_logprobs
        self._max_self_draft_nodes = self._wanted_self_draft_nodes if self._can(SELF_DRAFT) else 0
        of_prompt = sequence.num_prompt_logprobs if sequence.lacks_prompt_logprobs else None
        open_ = TargetOpen(
            spec=sequence.spec,
            stop_token_ids=sequence.stop_token_ids,
            age_s=time.monotonic() - self._arrived,
            num_preemptions=self._num_preemptions,
            num_logprobs=sequence.num_logprobs,
            num_prompt_logprobs=of_prompt,
            max_self_draft_nodes=self._max_self_draft_nodes,
        )
        lane.open(
            target_open(lane.sequence, open_, self._model_digest, traceparent=self._traceparent),
            of_round(Round(0, sequence.base), sequence.num_logprobs)
            + allowances.of_prompt(sequence.num_prompt_tokens, of_prompt),
        )
        return lane

    def _checked(self, verdict: Verdict, sequence: Sequence, tree: TokenTree) -> Verdict:
        """The verdict with its accepted nodes as nodes of ``tree``. Marks the round as answered.

        A target that sends an invalid verdict is ejected, and this sequence is replayed elsewhere.
        """
        round_ = next((round_ for round_ in self._rounds if round_.number == verdict.round), None)
        later = [each for each in self._rounds if each.number > verdict.round]
        if round_ is None or verdict.base != sequence.base:
            expected = " or ".join(str(round_.number) for round_ in self._rounds)
            problem = f"round {verdict.round} at base {verdict.base} for {expected} at {sequence.base}"
        elif len(verdict.self_draft) > round_.self_draft_nodes:
            problem = (
                f"a self-draft of {len(verdict.self_draft)} nodes, more than the allowed {round_.self_draft_nodes}"
            )
        elif (accepted := _accepted(round_, verdict, sequence.ids[round_.base :], tree)) is None:
            problem = f"accepted nodes {verdict.accepted}, which are no path of the tree it was sent"
        elif verdict.num_autonomous_left > round_.num_autonomous:
            problem = f"{verdict.num_autonomous_left} autonomous verdicts left, more than {round_.num_autonomous}"
        elif verdict.refused and (verdict.accepted or not round_.tree.draft_probs):
            problem = "it refuses a tree in which nothing was drawn, or accepts a part of it"
        elif verdict.dropped_round and [verdict.dropped_round] != [each.number for each in later if each.tree]:
            problem = f"round {verdict.dropped_round} dropped, which was not sent early"
        elif sequence.lacks_prompt_logprobs or _lacks_logprobs(verdict, sequence.num_logprobs):
            problem = "not the logprobs that were requested"
        else:
            if verdict.dropped_round:
                later, self._round = [], verdict.round
            base = verdict.base + len(verdict.accepted) + 1
            going_on = Round(
                round_.number,
                base,
                num_autonomous=verdict.num_autonomous_left - 1,
                self_draft_nodes=round_.self_draft_nodes,
            )
            autonomous = [going_on] if verdict.num_autonomous_left else []
            self._rounds = [*autonomous, *later]
            self._answered = verdict.round
            return verdict if accepted == verdict.accepted else replace(verdict, accepted=accepted)
        self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        error = HostileReplica(f"the target sent an invalid verdict: {problem}")
        if self._replica is not None:
            self._replica.eject(str(error))
        self.park()
        raise error

    def _remember(self, error: SpecdecError) -> None:
        self._cause = error.reason
        self._refused = isinstance(error, Overloaded)
        if self._refused and self._replica is not None:
            self._replica.num_refused += 1
            self._pool.waiting_for_room.add(self)
        self._num_preemptions += isinstance(error, Preempted)
        if self._replica is not None:
            self._losses.lost(error, self._replica, self._instance)


def _lacks_logprobs(verdict: Verdict, num_top: int | None) -> bool:
    """Whether they are missing or of other tokens. A small vocabulary has fewer than ``num_top`` tokens."""
    if verdict.logprobs is None or num_top is None:
        return verdict.logprobs is not None or num_top is not None
    return len(verdict.logprobs) != 1 + len(verdict.accepted) or verdict.logprobs.num_top > num_top


def _accepted(round_: Round, verdict: Verdict, since: Seq[int], tree: TokenTree) -> tuple[int, ...] | None:
    """The accepted nodes of the round's tree as nodes of ``tree``, the part of it that is left after ``since``. None:
    they are no path there. Those of a self-draft stay as they are."""
    if verdict.self_draft:
        return verdict.accepted if verdict.self_draft.is_path(verdict.accepted) else None
    above = round_.tree.trace(since)
    if (len(above) < len(since) and verdict.accepted) or not round_.tree.is_path((*above, *verdict.accepted)):
        return None
    nodes = tree.trace([round_.tree.token_ids[node] for node in verdict.accepted])
    return tuple(nodes) if len(nodes) == len(verdict.accepted) else None


def _to_come(round_: Round, base: int) -> int:
    """Verdicts of a round that are still to come at ``base``."""
    return 1 + max(0, round_.num_autonomous - (base - round_.base))


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return max(error.retry_after_s, _SHORTEST_PAUSE_S) if isinstance(error, Overloaded) else _backoff(state)

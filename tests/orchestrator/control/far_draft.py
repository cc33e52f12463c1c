"""A draft at a distance and a target, in simulated time: the real loop, trie, controller and draft engine.

Only clocks, wires and models are simulated: a step of the draft takes a given time, whatever it grows, a message half a
round trip, and the models are tables.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from draft_service.engine import DraftEngine, DraftOpen
from orchestrator.control.controller import Adaptive, Controller, Fixed
from orchestrator.control.cost_model import CostModel
from orchestrator.control.draft_length import DraftLength
from orchestrator.control.self_draft_length import SelfDraftLength
from orchestrator.decoder import decode
from orchestrator.drafting.draft_client import LATE, DraftClient
from orchestrator.drafting.speculation import Speculation
from orchestrator.rounds import Exchange, Proposal, RoundPlan, RoundRecord
from orchestrator.sequence import Sequence
from orchestrator.statistics import Statistics
from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd, Timings, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.server.step_loop import Key
from specdec.speculation.acceptance import AcceptanceModel
from specdec.speculation.prompt_lookup import HitRates, PromptLookup
from target_service.self_draft.text_lookup import chain_of
from testing.table_model import Table, TableDrafter
from tests.models.fake_peers import new_sequence, still_to_come

KEY = Key(0, 0)


@dataclass(frozen=True, slots=True)
class Place:
    """Milliseconds. After ``dead_after`` the draft no longer answers; below 0 there is none. All ``sequences`` of a
    pass do what this one does."""

    acceptance: float = 0.8
    pass_ms: float = 40.0
    row_ms: float = 0.1
    step_ms: float = 4.0
    distance_ms: float = 0.0  # to the draft and back
    beyond_ms: float = 0.5  # of a round with the target that was asked for
    noise: float = 0.05
    dead_after: float = float("inf")
    sequences: int = 1

    @property
    def alone(self) -> float:
        """Tokens per second of the target, unasked."""
        return 1e3 / (self.pass_ms + self.row_ms * self.sequences)


class World:
    """A place, and what time it is there."""

    def __init__(self, place: Place, seed: int, table: Table | None = None) -> None:
        self.place = place
        self.now = 0.0
        self.table = table or Table(acceptance=place.acceptance, runner_up=0.5)
        self._random = random.Random(seed)

    def took(self, milliseconds: float) -> float:
        """Seconds, more or less."""
        return milliseconds / 1e3 * self._random.lognormvariate(0.0, self.place.noise)


class FarDraft:
    """In place of DraftClient."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._engine = DraftEngine(TableDrafter(world.table))
        self._up: deque[tuple[float, Callable[[], None]]] = deque()
        self._down: deque[tuple[float, Growth]] = deque()
        self._free_at = 0.0
        self._base = 0
        self._owed_since: float | None = None
        self._paused_until, self._pause_s = 0.0, 5.0
        self._asked, self._asked_nodes = 0.0, 0
        self._answer: tuple[int, float] | None = None
        self.num_advances = -1

    def advance(
        self, sequence: Sequence, budget: Budget, in_flight: TokenTree = EMPTY_TREE, num_there: int = 0
    ) -> bool:
        if self._world.place.dead_after < 0 or self._world.now < self._paused_until:
            return False
        self._asked, self._asked_nodes = self._world.now, budget.max_nodes or int(not in_flight)
        self._tell(sequence, budget, in_flight)
        return True

    def catch_up(self, sequence: Sequence) -> None:
        if self.num_advances >= 0 and sequence.base - self._base >= 16:
            self._tell(sequence, Budget(), EMPTY_TREE)

    def _tell(self, sequence: Sequence, budget: Budget, in_flight: TokenTree) -> None:
        self.num_advances += 1
        new, self._base = tuple(sequence.ids[self._base :]), sequence.base
        if not self.num_advances:
            spec = replace(sequence.spec, token_ids=new)
            message = lambda: self._engine.open(KEY, DraftOpen(spec, budget))  # noqa: E731
        else:
            advance = Advance(self.num_advances, self._base, new, in_flight, budget)
            message = lambda: self._engine.submit(KEY, advance)  # noqa: E731
        self._up.append((self._world.now + self._world.place.distance_ms / 2e3, message))

    def arrived(self) -> Iterator[Growth]:
        while self._goes_on(self._world.now):
            pass
        while self._down and self._down[0][0] <= self._world.now:
            yield self._took(*self._down.popleft())

    def take_answer(self) -> tuple[int, float] | None:
        answer, self._answer = self._answer, None
        return answer

    async def growth(self, sequence: Sequence, deadline_s: float, waited_s: float = 0.0) -> Growth | None:
        until = self._world.now + deadline_s - waited_s
        while not self._down and self._goes_on(until):
            pass
        if self._down and self._down[0][0] <= until:
            self._world.now = max(self._world.now, self._down[0][0])
            return self._took(*self._down.popleft())
        if self.num_advances:
            self._answer = self._asked_nodes, LATE * (until - self._asked)
        self._world.now = until
        self._owed_since = self._asked if self._owed_since is None else self._owed_since
        if until - self._owed_since >= 1.0:  # as DraftClient does
            self._paused_until, self._pause_s, self._owed_since = until + self._pause_s, 2 * self._pause_s, None
        return None

    def _took(self, heard: float, growth: Growth) -> Growth:
        nodes, self._owed_since = self._asked_nodes, None
        if growth.advance == self.num_advances and nodes and (growth.end or len(growth.tree) >= nodes):
            self._asked_nodes = 0
            if growth.end in (None, GrowthEnd.BUDGET) and growth.advance:
                self._answer = nodes, heard - self._asked
        return growth

    def _goes_on(self, until: float) -> bool:
        """The draft's next step, if it begins by then; a message that comes while it works waits."""
        begins = self._free_at
        if self._engine.idle:
            if not self._up or self._up[0][0] > until:
                return False
            begins = max(begins, self._up[0][0])
        if begins > until or begins > self._world.place.dead_after / 1e3:
            return False
        while self._up and self._up[0][0] <= begins:
            self._up.popleft()[1]()
        passes = self._engine.load.passes
        results = self._engine.step()
        stepped = self._engine.load.passes > passes
        self._free_at = begins + (self._world.took(self._world.place.step_ms) if stepped else 0.0)
        back_s = self._world.place.distance_ms / 2e3
        self._down += [(self._free_at + back_s, cast(Growth, growth)) for _, growth in results]
        return True

    def eject(self, reason: str) -> None:
        raise AssertionError(reason)


class NearTarget:
    """In place of TargetClient."""

    def __init__(
        self,
        world: World,
        next_round: Callable[[Sequence], tuple[TokenTree, int]] | None,
        lookup: PromptLookup | None = None,
    ) -> None:
        """``lookup``: with which the target drafts by itself."""
        self._world, self._lookup = world, lookup
        self._next_round = next_round
        self._unasked = self._number = 0
        self._left: TokenTree | None = None  # of a round that was sent early, if it stands
        self._begins_s = 0.0  # its pass, after the verdict before was out
        self.num_rows = 0

    async def verify(self, sequence: Sequence, proposal: Proposal, plan: RoundPlan) -> tuple[Verdict, RoundRecord]:
        world, place, tree, self_draft = self._world, self._world.place, proposal.tree, EMPTY_TREE
        if self._lookup is not None and self._number and not tree:
            tree = self_draft = chain_of(self._lookup, sequence.ids, plan.self_draft_nodes)
        ids, accepted, node = list(sequence.ids), [], -1
        while True:
            token = world.table.next_token(sequence.spec, ids, len(ids))
            if (child := tree.child(node, token)) is None:
                break
            accepted.append(node := child)
            ids.append(token)
        rows, dropped = len(tree) + 1, 0
        self.num_rows += rows
        pass_s = world.took(place.pass_ms + place.row_ms * rows * place.sequences)
        timings = Timings(0, int(pass_s * 1e6), 0, rows * place.sequences, place.sequences)
        if self._unasked:
            assert not proposal.tree, "nothing is verified among tokens that come unasked"
            world.now += pass_s
            exchange = Exchange(num_live=place.sequences)
            self._unasked = max(0, still_to_come(self._unasked, plan.num_autonomous) - len(accepted))
        else:
            asked, under_way = world.now, self._left is not None
            beyond_s = world.took(place.beyond_ms)
            took_s = pass_s + (self._begins_s if under_way else beyond_s)
            self._left = None
            after_s = plan.next_round_after_s
            at_s = max(0.0, (after_s or 0.0) - (beyond_s if under_way else 0.0))
            if self._next_round is not None and after_s is not None and self._number and at_s < took_s:
                world.now = asked + at_s
                committed = [*ids[sequence.base :], token]
                dropped = self._begin(*self._next_round(sequence), committed, at_s + beyond_s - took_s)
            world.now = asked + took_s
            exchange = Exchange(took_s, under_way, num_live=place.sequences)
            self._unasked = plan.num_autonomous
        self._number += 1
        verdict = Verdict(
            self._number - 1,
            sequence.base,
            tuple(accepted),
            token,
            timings,
            num_autonomous_left=self._unasked,
            dropped_round=dropped,
            self_draft=self_draft,
        )
        return verdict, RoundRecord.of(proposal, verdict, exchange)

    def _begin(self, sent: TokenTree, max_nodes: int, committed: list[int], late_s: float) -> int:
        """A round that is at the target so long after the verdict before went out. Returns its number if it is
        dropped."""
        left = sent.descend(committed).prefix(max_nodes)
        if left or (sent and late_s > 0):
            self._left, self._begins_s = left, max(0.0, late_s)
            return 0
        return self._number + 1 if sent else 0


class Shared:
    """What the requests of one orchestrator share."""

    def __init__(self, ahead: bool, most: int = 8) -> None:
        self.costs, self.acceptance = CostModel(), AcceptanceModel()
        self.policy = DraftLength(self.costs, most, ahead)
        self.hit_rates, self.hit_rates_of_target = HitRates(), HitRates()
        self.self_lookup = SelfDraftLength(self.costs, MAX_DRAFT_TOKENS, looks_up=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    tokens_per_s: float
    token_ids: list[int]
    num_rows: int
    waited_s: float
    statistics: Statistics


async def decoded(
    place: Place,
    num_tokens: int = 600,
    num_draft_tokens: int | None = None,
    max_ahead: int = 60,
    shared: Shared | None = None,
    seed: int = 0,
    controller: Any = None,
    takes_early: bool = True,
    looks_up: bool = False,
    target_looks_up: bool = False,
    table: Table | None = None,
    prompt: tuple[int, ...] = (),
) -> Outcome:
    """A greedy request of so many tokens."""
    shared = shared or Shared(max_ahead > 0)
    world = World(place, seed, table)
    sequence = new_sequence(prompt or (1, 2, 3 + seed), num_tokens, temperature=0.0)
    sequence.statistics.clock = lambda: world.now
    chances = AcceptanceModel(shared.acceptance)
    lookup = PromptLookup(shared.hit_rates) if looks_up else None
    if controller is None:
        self_draft = shared.self_lookup if target_looks_up else None
        adaptive = Adaptive(shared.policy, chances, lookup, self_draft=self_draft)
        controller = adaptive if num_draft_tokens is None else Fixed(num_draft_tokens)
    draft = cast(DraftClient, FarDraft(world))
    speculation = Speculation(draft, max_ahead, 0, chances, lookup, clock=lambda: world.now)
    lookup_of_target = PromptLookup(shared.hit_rates_of_target) if target_looks_up else None
    target = NearTarget(world, speculation.next_round if takes_early else None, lookup_of_target)
    async for _ in decode(sequence, target, speculation, cast(Controller, controller)):
        pass
    waited_s = sequence.statistics.draft_wait_us / 1e6
    return Outcome(num_tokens / world.now, sequence.ids, target.num_rows, waited_s, sequence.statistics)

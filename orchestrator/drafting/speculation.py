"""The source of the next tree: the speculation trie of one sequence, and the drafters that fill it.

Knows which nodes still count; does not know how they were proposed or verified. The trie is a TokenTree that
hangs from the last committed token. Nodes count while their path from there matches the committed tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.drafting.draft_client import DraftClient
from orchestrator.drafting.forced_tokens import ForcedTokens
from orchestrator.rounds import Drafting, Grant, Proposal, RoundPlan, Source
from orchestrator.sequence import Sequence
from specdec.core.rounds import Budget, Growth, Verdict
from specdec.core.tree import EMPTY_TREE, MAX_TREE_NODES, ROOT, GrowingTree, TokenTree
from specdec.speculation.acceptance import AcceptanceModel
from specdec.speculation.prompt_lookup import PromptLookup

_MAX_EARLY_NODES = 256
"""Nodes of an early round at most: the target has to walk them between two passes."""

_NODES_PER_TURN = 4096
"""Arrived nodes that are taken before other tasks run, about. What is left is taken the next time."""


@dataclass(slots=True)
class _Round:
    """The round that is prepared and in flight, from one verdict to the next."""

    plan: RoundPlan = field(default_factory=RoundPlan)
    tree: TokenTree | None = None  # what is verified, if that is known before any wait
    source: Source | None = None  # of ``tree``
    max_nodes: int = 0  # of the trie to verify
    num_wanted: int = 0  # nodes that the round waits for
    growing: bool = False  # requested nodes are still to come
    arrived: bool | None = None  # see Drafting
    is_hit: bool = False
    num_verifying: int = 0  # nodes being verified: the first ones of the trie
    may_send: bool = False  # the next round may be sent early


class Speculation:
    """The speculation of one sequence. A missing, late or hostile draft is an empty tree.

    While the target verifies, the draft may grow ``max_ahead`` nodes more: below the nodes in flight, and at the
    most likely corrections. After a speculation hit the next tree is there, and the round does not wait for the draft.
    ``max_siblings`` further candidates are verified next to each node of a chain that the round waits for. ``lookup``
    proposes tokens from the text itself. ``chains``: the target verifies these alone, so trees are cut to them.
    """

    def __init__(
        self,
        draft: DraftClient,
        max_ahead: int = 0,
        max_siblings: int = 0,
        chances: AcceptanceModel | None = None,
        lookup: PromptLookup | ForcedTokens | None = None,
        chains: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._draft = draft
        self._chances = chances or AcceptanceModel()
        self._lookup = lookup
        self._max_ahead = max_ahead
        self._max_siblings = max_siblings
        self._chains = chains
        self._clock = clock
        self._trie = GrowingTree()
        self._base = 0  # position at which the trie hangs
        self._round = _Round()
        self._granted = 0  # end of the positions for which tokens were ever requested
        self._num_received = 0  # nodes since the last proposal
        self._sent: tuple[TokenTree, int] | None = None  # an early round, and the nodes to verify of what is left of it

    def advance(self, sequence: Sequence, plan: RoundPlan, verdict: Verdict | None = None) -> None:
        """Re-root the trie at the end of the committed text, and let the draft grow it as planned. ``verdict``: the one
        that committed it. If a round was sent before that verdict, it is verified next, and the plan is for the growth
        after it."""
        left = self._left_in_flight(sequence, verdict)
        if verdict is not None and verdict.refused:
            self._refuse("a token that its distribution does not give")
        is_hit = self._reroot(sequence)
        waits = next((grant for grant in plan.grants if grant.source is Source.DRAFT and grant.waits), None)
        depth = max((grant.num_tokens for grant in plan.grants if grant.source is Source.DRAFT), default=0)
        self._round = round_ = _Round(plan, left, Source.DRAFT if left else None, max_nodes=depth, is_hit=is_hit)
        autonomous = verdict is not None and verdict.num_autonomous_left > 0
        if left is None and not autonomous:
            self._choose()
        looked_up = round_.source is Source.LOOKUP
        worth_growing = depth and (not looked_up or self._worth_growing_around(round_.tree))
        if worth_growing and self._max_ahead and sequence.keyed_by_token:
            num_wanted = waits.num_tokens if waits and round_.tree is None else 0
            asked = self._grow_ahead(sequence, depth, num_wanted)
            # Hits are counted for sequences that can hit: token and block verification always wait.
            if asked and self._draft.num_advances and not looked_up and not autonomous:
                round_.arrived = bool(round_.tree)
        elif waits and not looked_up and left is None:
            self._wait_for(sequence, waits)
        else:
            self._draft.catch_up(sequence)

    def _left_in_flight(self, sequence: Sequence, verdict: Verdict | None) -> TokenTree | None:
        """What is still valid of the tree of the early round; None: there is none. An open begins again."""
        sent, self._sent = self._sent, None
        if sent is None or verdict is None or not verdict.round or verdict.dropped_round:
            return None
        tree, num_nodes = sent
        return tree.descend(sequence.ids[self._base :]).prefix(num_nodes)

    def _choose(self) -> None:
        """The first grant that has tokens before any wait, unless the round first waits for a better one."""
        for grant in self._round.plan.grants:
            if tree := self._from(grant):
                self._round.tree, self._round.source = tree, grant.source
                return
            if grant.waits:
                return

    def _from(self, grant: Grant) -> TokenTree:
        """The tokens of a source that are there. What an earlier wait left is only a part of the next chain."""
        if grant.source is Source.LOOKUP:
            return self._lookup.propose(grant.num_tokens) if self._lookup is not None else EMPTY_TREE
        return self._worthwhile(self._trie.tree, grant.num_tokens) if self._max_ahead else EMPTY_TREE

    def _worth_growing_around(self, tree: TokenTree | None) -> bool:
        """A lookup proposal that is not in doubt hardly needs the draft around it."""
        return bool(self._max_ahead and tree and self._lookup is not None and self._lookup.doubtful(len(tree)))

    def _grow_ahead(self, sequence: Sequence, depth: int, num_wanted: int) -> bool:
        """Let the draft grow below the tree that is verified next, and at the most likely corrections. False: there is
        no draft."""
        tree = self._round.tree or EMPTY_TREE
        self._put_first(tree)
        # Below the last node in flight, as many nodes again; the last token of the output comes from the target.
        below = min(max(len(tree), depth) + depth + 1, sequence.remaining - 1)
        siblings = self._max_siblings if num_wanted else 0
        budget = Budget(max_nodes=num_wanted, max_depth=below, max_ahead=self._max_ahead, max_siblings=siblings)
        return self._request(sequence, budget, tree)

    def _put_first(self, tree: TokenTree) -> None:
        """The nodes that are verified next come before all others of the trie."""
        others, self._trie = self._trie.tree, GrowingTree(tree)
        self._trie.add(others)

    def _wait_for(self, sequence: Sequence, grant: Grant) -> None:
        """Request the tokens that the round waits for."""
        siblings = self._max_siblings if sequence.keyed_by_token else 0
        self._request(sequence, Budget(grant.num_tokens, grant.num_tokens, max_siblings=siblings), EMPTY_TREE)

    def _request(self, sequence: Sequence, budget: Budget, in_flight: TokenTree) -> bool:
        self._round.num_wanted = budget.max_nodes
        self._round.max_nodes = budget.max_nodes * (1 + budget.max_siblings) or self._round.max_nodes
        self._granted = max(self._granted, self._base + budget.max_depth)
        num_there = 0 if in_flight else max(self._trie.tree.depths, default=-1) + 1
        asked = self._draft.advance(sequence, budget, in_flight, num_there=num_there)
        self._round.growing = asked and budget.max_nodes > 0
        return asked

    def _worthwhile(self, tree: TokenTree, num_tokens: int) -> TokenTree:
        """The part of an arrived tree that is verified."""
        tree = self._cut(tree)
        if not self._round.plan.round_s:
            return self._chances.best(tree, num_tokens)
        return self._chances.most_per_second(tree, self._round.plan.round_s)

    def _cut(self, tree: TokenTree, first: int = ROOT) -> TokenTree:
        """What the target can verify of a tree: all, or below each node from ``first`` on the most likely chain."""
        return tree.part(tree.most_likely_chains(first)) if self._chains else tree

    def next_round(self, sequence: Sequence) -> tuple[TokenTree, int]:
        """The next round before the verdict on this one: a tree below the present base, and how many nodes (the first
        ones) to verify of what the verdict leaves of it. An empty tree: no new node has arrived, or this round may be
        the last one, or rounds must not be sent early."""
        num_verifying = self._round.num_verifying
        if not self._round.may_send:
            return EMPTY_TREE, 0
        self._add_arrived(sequence)
        # Of chains one is left, whatever is decided about the nodes in flight.
        trie = self._cut(self._trie.tree, num_verifying)
        nodes = self._chances.likeliest(trie)[:_MAX_EARLY_NODES]
        new = next((node for node in nodes if node >= num_verifying), None)
        if new is None or num_verifying + 1 >= sequence.remaining:
            return EMPTY_TREE, 0
        depth = max((grant.num_tokens for grant in self._round.plan.grants), default=1)
        max_nodes = len(self._worthwhile(trie.below(new)[0], depth)) or depth
        self._sent = trie.part(nodes), max_nodes
        return self._sent

    async def next(self, sequence: Sequence) -> Proposal:
        """The next tree to verify: draft tokens below the last committed token."""
        if not sequence.num_committed:
            return Proposal()  # the target's prefill gives the first token, while the draft makes its own prefill
        round_ = self._round
        num_asked = round_.num_wanted if round_.growing else 0
        waited_s = await self._wait(sequence) if round_.growing else None
        tree, source = round_.tree or EMPTY_TREE, round_.source
        if round_.tree is None and round_.num_wanted:
            tree, source = self._after_waiting()
        round_.num_verifying = len(tree)
        round_.may_send = bool(self._max_ahead) and sequence.keyed_by_token and source is not Source.LOOKUP
        drafting = Drafting(
            num_asked=num_asked,
            waited_s=waited_s,
            answer=self._draft.take_answer(),
            arrived=round_.arrived,
            hit=round_.is_hit,
            num_received=self._num_received,
        )
        self._num_received = 0
        return Proposal(tree, source if tree else None, drafting)

    def _after_waiting(self) -> tuple[TokenTree, Source]:
        """What the draft gave; without it, the best of the other grants."""
        if tree := self._cut(self._trie.tree).prefix(self._round.max_nodes):
            if self._chains:  # else it is the first part of the trie already
                self._put_first(tree)
            return tree, Source.DRAFT
        others = (self._from(grant) for grant in self._round.plan.grants if grant.source is Source.LOOKUP)
        return next(others, EMPTY_TREE), Source.LOOKUP

    def _add_arrived(self, sequence: Sequence) -> None:
        room = _NODES_PER_TURN
        for growth in self._draft.arrived():
            self._add_growth(sequence, growth)
            room -= 1 + len(growth.tree)
            if room <= 0:
                return

    def _reroot(self, sequence: Sequence) -> bool:
        """Whether draft tokens are left below the end of the committed text."""
        self._add_arrived(sequence)
        left = self._trie.tree.descend(sequence.ids[self._base :]) if sequence.keyed_by_token else EMPTY_TREE
        self._trie = GrowingTree(left)
        self._base = sequence.base
        return bool(left)

    async def _wait(self, sequence: Sequence) -> float:
        """Wait until the requested nodes have arrived or are given up. Returns seconds."""
        started = self._clock()
        while self._round.growing:
            growth = await self._draft.growth(sequence, self._round.plan.deadline_s, self._clock() - started)
            if growth is None:
                self._round.growing = False
                # Half a chain would be a proposal cut because it is late, which would bias the output.
                if not sequence.keyed_by_token:
                    self._trie = GrowingTree()
            else:
                self._add_growth(sequence, growth)
                if self._round.growing:
                    await asyncio.sleep(0)  # more may have arrived than one turn of the event loop should take
        return self._clock() - started

    def _add_growth(self, sequence: Sequence, growth: Growth) -> None:
        if growth.advance == self._draft.num_advances and (growth.end or len(growth.tree) >= self._round.num_wanted):
            self._round.growing = False
        if not growth.tree:
            return None  # for example the answer to an advance that requested nothing
        if not sequence.num_prompt_tokens <= growth.base <= self._base:
            return self._refuse(f"a growth from base {growth.base} at base {self._base}")
        end = growth.base + len(growth.path) + max(growth.tree.depths) + 1
        if end > self._granted:
            return self._refuse(f"a growth to position {end}, {self._granted} was requested")
        keyed = sequence.keyed_by_token
        if not keyed and growth.base != self._base:
            return None  # the answer to an older advance
        grown = self._left_of(sequence, growth, end)
        if keyed and grown.draft_probs:
            # Distributions were not requested, and the target refuses them in a tree that branches.
            grown = TokenTree(grown.token_ids, grown.parents)
        # Nodes that the verdict has made obsolete count as received, too.
        self._num_received += self._trie.add(grown.prefix(self._room)) if grown else len(growth.tree)
        if not keyed and not (self._trie.tree.is_chain and len(self._trie) <= self._round.max_nodes):
            return self._refuse("growths that are not the requested chain")
        return None

    @property
    def _room(self) -> int:
        """For how many nodes the trie has room. More than can be verified at a time are of no use."""
        return max(0, MAX_TREE_NODES - len(self._trie))

    def _left_of(self, sequence: Sequence, growth: Growth, end: int) -> TokenTree:
        """The nodes of a growth, which reaches to position ``end``, that are below the committed text."""
        if end <= self._base:
            return EMPTY_TREE
        grown = growth.tree.under(growth.path) if growth.path else growth.tree
        return grown.descend(sequence.ids[growth.base : self._base])

    def _refuse(self, reason: str) -> None:
        self._round.growing, self._trie = False, GrowingTree()
        self._draft.eject(reason)

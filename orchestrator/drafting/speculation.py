"""The source of the next tree: the speculation trie of one sequence, and the draft that grows it.

Knows which nodes still count; does not know how they were proposed or verified. The trie is a TokenTree that
hangs from the last committed token. Nodes count while their path from there matches the committed tokens.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial

from orchestrator.drafting.draft_client import DraftClient
from orchestrator.rounds import NO_GUESS, Proposal, Rival, RoundPlan
from orchestrator.sequence import Sequence
from specdec.core.rounds import Budget, Growth
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.speculation.acceptance import AcceptanceModel

_MAX_EARLY_NODES = 256
"""Nodes of an early round at most: the target has to walk them between two passes."""


class Speculation:
    """The speculation of one sequence. A missing, late or hostile draft is an empty tree.

    While the target verifies, the draft may grow ``max_ahead`` nodes more: below the nodes in flight, and at the
    likeliest corrections. After a speculation hit the next tree is there, and the round does not wait for the draft.
    ``max_siblings`` runners-up are verified beside each node of a chain that the round waits for. If the plan says so,
    a prompt-lookup proposal is verified instead.
    """

    def __init__(
        self,
        draft: DraftClient,
        max_ahead: int = 0,
        max_siblings: int = 0,
        chances: AcceptanceModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._draft = draft
        self._chances = chances or AcceptanceModel()
        self._max_ahead = max_ahead
        self._max_siblings = max_siblings
        self._clock = clock
        self._trie = EMPTY_TREE
        self._guess = NO_GUESS  # of the plan
        self._guessed: Rival | None = None  # what the guess replaces; None: it is not used
        self._foreseen: bool | None = None  # see Proposal
        self._was_there = False
        self._num_received = 0
        self._base = 0  # position at which the trie hangs
        self._num_nodes = 0  # to verify next, at most
        self._num_wanted = 0  # nodes that the round waits for
        self._granted = 0  # end of the positions for which tokens were ever requested
        self._growing = False  # requested nodes are still to come
        self._plan = RoundPlan(Budget())
        self._num_in_flight = 0  # nodes being verified: the first ones of the trie
        self._under_way: TokenTree | None = None  # the tree of an early round, which is verified next

    def advance(self, sequence: Sequence, plan: RoundPlan, under_way: TokenTree | None = None) -> None:
        """Re-root the trie at the end of the committed text, and let the draft grow it as planned. ``under_way``: the
        tree of an early round, which is verified next; the plan is then for the growth after it."""
        self._reroot(sequence)
        self._plan, self._under_way = plan, under_way
        self._guess, self._guessed, self._foreseen, self._growing = plan.guess, None, None, False
        guess = self._instead_of(Rival.TREE if self._trie else Rival.WAIT)
        budget, max_depth = plan.budget, plan.budget.max_depth
        if self._under_way is not None:
            budget = dataclasses.replace(budget, max_nodes=0)
        self._num_nodes = self._num_wanted = budget.max_nodes
        grows_ahead = self._max_ahead > 0 and sequence.keyed_by_token and max_depth > 0
        asks = grows_ahead or budget.max_nodes > 0
        if guess:
            asks = grows_ahead and plan.guess.in_doubt  # a guess that is not in doubt hardly needs the draft around it
        if not asks:
            self._draft.catch_up(sequence)
            return
        in_flight = guess
        if grows_ahead:
            if self._under_way is not None:
                in_flight = self._under_way
            elif not plan.soon:
                in_flight = guess or self._worthwhile(self._trie)
            self._trie = in_flight.merge(self._trie)
            # Below the last node in flight, as many nodes again; the last token of the output comes from the target.
            depth = min(max(len(in_flight), max_depth) + max_depth + 1, sequence.remaining - 1)
            max_nodes = 0 if in_flight else budget.max_nodes
            budget = dataclasses.replace(budget, max_nodes=max_nodes, max_depth=depth, max_ahead=self._max_ahead)
            self._num_nodes = len(in_flight) or self._num_nodes
        if budget.max_nodes and self._max_siblings and sequence.keyed_by_token:
            budget = dataclasses.replace(budget, max_siblings=self._max_siblings)
            self._num_nodes = budget.max_nodes * (1 + self._max_siblings)
        self._granted = max(self._granted, self._base + budget.max_depth)
        num_there = 0 if in_flight else max(self._trie.depths, default=-1) + 1
        asked = self._draft.advance(sequence, budget, in_flight, num_there)
        self._growing = asked and budget.max_nodes > 0
        # Hits are counted for sequences that can hit: token and block verification always wait.
        if asked and self._draft.num_advances and not (guess or plan.soon) and sequence.keyed_by_token:
            self._foreseen = bool(in_flight)

    def _worthwhile(self, tree: TokenTree) -> TokenTree:
        """The part of an arrived tree that is verified."""
        if not self._plan.rounds:
            return self._chances.best(tree, self._plan.budget.max_depth)
        return self._chances.most_per_second(tree, self._plan.rounds)

    def _early(self, sequence: Sequence) -> tuple[TokenTree, int]:
        """See orchestrator.rounds.Early."""
        self._take_arrived(sequence)
        nodes = self._chances.likeliest(self._trie)[:_MAX_EARLY_NODES]
        new = next((node for node in nodes if node >= self._num_in_flight), None)
        # No early round if no new node has arrived, or if this round may be the last one.
        if new is None or self._num_in_flight + 1 >= sequence.remaining:
            return EMPTY_TREE, 0
        most = len(self._worthwhile(self._trie.below(new)[0])) or self._plan.budget.max_depth
        return self._trie.part(nodes), most

    def _take_arrived(self, sequence: Sequence) -> None:
        for growth in self._draft.arrived():
            self._take(sequence, growth)

    def _reroot(self, sequence: Sequence) -> None:
        self._take_arrived(sequence)
        self._trie = self._trie.descend(sequence.ids[self._base :]) if sequence.keyed_by_token else EMPTY_TREE
        self._base = sequence.base
        self._was_there = bool(self._trie)

    def _instead_of(self, rival: Rival) -> TokenTree:
        """The plan's guess if it is to be verified instead of ``rival``, else an empty tree."""
        if not self._guess.tree or rival > self._guess.beats or self._under_way is not None:
            return EMPTY_TREE
        self._guessed = rival
        return self._guess.tree

    async def next(self, sequence: Sequence) -> Proposal:
        """The next tree to verify: up to max_nodes draft tokens below the last committed token."""
        if not sequence.num_committed:
            return Proposal()  # the target's prefill gives the first token, while the draft makes its own prefill
        waited_s = await self._wait(sequence) if self._growing else None
        if self._under_way is not None:
            tree = self._under_way
        else:
            tree = self._trie.prefix(self._num_nodes) if self._guessed is None else self._guess.tree
            tree = tree or self._instead_of(Rival.NOTHING)
        early = None
        if self._plan.early and self._max_ahead and sequence.keyed_by_token and self._guessed is None:
            self._num_in_flight = len(tree)
            early = partial(self._early, sequence)
        num_received, self._num_received = self._num_received, 0
        return Proposal(tree, self._guessed, self._foreseen, self._was_there, num_received, waited_s, early)

    async def _wait(self, sequence: Sequence) -> float:
        """Wait until the requested nodes have arrived or are given up. Returns seconds."""
        started = self._clock()
        while self._growing:
            growth = await self._draft.growth(sequence)
            if growth is None:
                self._growing = False
                # Half a chain would be a proposal cut because it is late, which would bias the output.
                if not sequence.keyed_by_token:
                    self._trie = EMPTY_TREE
            else:
                self._take(sequence, growth)
        return self._clock() - started

    def _take(self, sequence: Sequence, growth: Growth) -> None:
        if growth.advance == self._draft.num_advances and (growth.end or len(growth.tree) >= self._num_wanted):
            self._growing = False
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
        grown = growth.tree.under(growth.path) if growth.path else growth.tree
        if keyed and grown.draft_probs:
            # Distributions were not requested, and the target refuses them in a tree that branches.
            grown = TokenTree(grown.token_ids, grown.parents)
        grown = grown.descend(sequence.ids[growth.base : self._base])
        trie = self._trie.merge(grown)
        if not keyed and not (trie.is_chain and len(trie) <= self._num_nodes):
            return self._refuse("growths that are not the requested chain")
        # Nodes that the verdict has made obsolete count as received, too.
        self._num_received += len(trie) - len(self._trie) if grown else len(growth.tree)
        self._trie = trie
        return None

    def _refuse(self, reason: str) -> None:
        self._growing, self._trie = False, EMPTY_TREE
        self._draft.eject(reason)

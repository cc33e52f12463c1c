"""Where the next tree comes from: the speculation trie of one sequence, and the draft that makes it grow.

Knows which nodes still count; refuses to know how they were proposed or verified. The trie is a TokenTree that
hangs from the last committed token. Nodes count while their path from there matches what is committed.
"""

from __future__ import annotations

import dataclasses

from orchestrator.draft_client import DraftClient
from orchestrator.prompt_lookup import PromptLookup, Rival
from orchestrator.sequence import Sequence
from specdec.chances import Chances, best
from specdec.rounds import Budget, Growth
from specdec.tree import EMPTY_TREE, TokenTree


class Speculation:
    """No draft, a late one or a hostile one is an empty tree.

    While the target verifies, the draft may grow ``max_ahead`` nodes more: below what is in flight, and at its
    likeliest corrections. After a verdict that was foreseen the next tree is there, and nobody waits for the draft.
    ``max_siblings`` runners-up are verified beside each node of a chain that is waited for. Where the controller says
    that it pays, what the ``lookup`` guesses is verified instead.
    """

    def __init__(
        self,
        draft: DraftClient,
        max_ahead: int = 0,
        max_siblings: int = 0,
        lookup: PromptLookup | None = None,
        chances: Chances | None = None,
    ) -> None:
        self._draft = draft
        self._chances = chances or Chances()
        self._lookup = lookup
        self._max_ahead = max_ahead
        self._max_siblings = max_siblings
        self._trie = EMPTY_TREE
        self._guess = EMPTY_TREE  # what is verified instead
        self._base = 0  # where the trie hangs
        self._num_nodes = 0  # to be verified next, at most
        self._num_wanted = 0  # of them, so many are waited for
        self._granted = 0  # no draft was ever asked for a token at this position, or behind it
        self._growing = False

    def advance(self, sequence: Sequence, budget: Budget) -> None:
        """Re-root the trie at what was committed, and let the draft grow it by ``budget``."""
        committed = sequence.ids[self._base :]
        self._trie = self._trie.descend(committed) if sequence.keyed_by_token else EMPTY_TREE
        self._base = sequence.base
        self._num_nodes = self._num_wanted = budget.max_nodes
        self._growing = False
        for growth in self._draft.arrived():
            self._take(sequence, growth)
        sequence.statistics.go_on(foreseen=bool(self._trie))
        self._guess = self._lookup.take(Rival.TREE if self._trie else Rival.WAIT) if self._lookup else EMPTY_TREE
        if self._guess:
            self._grow_around_guess(sequence, budget)
            return
        waits, grows_ahead = budget.max_nodes > 0, self._max_ahead > 0 and sequence.keyed_by_token
        if not waits and not (grows_ahead and budget.max_depth):
            self._draft.catch_up(sequence)
            return
        in_flight = EMPTY_TREE
        if self._max_siblings and sequence.keyed_by_token:
            budget = dataclasses.replace(budget, max_siblings=self._max_siblings)
            self._num_nodes = budget.max_nodes * (1 + self._max_siblings)
        if grows_ahead:
            # Below the last node in flight, as many again; the last token of all comes from the target.
            depth = min(2 * budget.max_depth + 1, sequence.remaining - 1)
            in_flight = best(self._chances.of_ranks, self._trie, budget.max_depth)
            self._trie = in_flight.merge(self._trie)
            max_nodes = 0 if in_flight else budget.max_nodes
            budget = dataclasses.replace(budget, max_nodes=max_nodes, max_depth=depth, max_ahead=self._max_ahead)
            self._num_nodes = len(in_flight) or self._num_nodes
        self._granted = max(self._granted, self._base + budget.max_depth)
        self._growing = self._draft.advance(sequence, budget, in_flight, waits) and waits and not in_flight
        sequence.statistics.asked(self._draft.num_advances, len(self._trie))

    def _grow_around_guess(self, sequence: Sequence, budget: Budget) -> None:
        """The draft may grow below a guess and at its corrections, unless it will hardly be needed."""
        if not (budget.max_depth and self._max_ahead and self._lookup and self._lookup.in_doubt):
            self._draft.catch_up(sequence)
            return
        self._trie = self._guess.merge(self._trie)
        depth = min(len(self._guess) + budget.max_depth + 1, sequence.remaining - 1)
        budget = dataclasses.replace(budget, max_nodes=0, max_depth=depth, max_ahead=self._max_ahead)
        self._granted = max(self._granted, self._base + depth)
        if self._draft.follow(sequence, budget, self._guess):
            sequence.statistics.asked(self._draft.num_advances, len(self._trie))

    async def next(self, sequence: Sequence) -> TokenTree:
        """The tree to verify: up to max_nodes draft tokens below the last committed token."""
        if not sequence.num_committed:
            return EMPTY_TREE  # the target's prefill gives the first token; the draft's runs beside it
        while self._growing:
            with sequence.statistics.waiting_for_draft():
                growth = await self._draft.growth(sequence)
            if growth is None:
                self._growing = False
                # Half a chain would be a proposal cut for its lateness.
                if not sequence.keyed_by_token:
                    self._trie = EMPTY_TREE
            else:
                self._take(sequence, growth)
        tree = self._guess or self._trie.prefix(self._num_nodes)
        if not tree and self._lookup:
            tree = self._guess = self._lookup.take(Rival.NOTHING)
        sequence.statistics.submits(guessed=bool(self._guess))
        return tree

    def _take(self, sequence: Sequence, growth: Growth) -> None:
        sequence.statistics.proposed(growth)
        if growth.advance == self._draft.num_advances and (growth.end or len(growth.tree) >= self._num_wanted):
            self._growing = False
        if not growth.tree:
            return None  # such as the answer to what a draft of which nothing was asked is told
        if growth.base > sequence.base or growth.base < sequence.num_prompt_tokens:
            return self._refuse(f"a growth from base {growth.base} at base {sequence.base}")
        end = growth.base + len(growth.path) + max(growth.tree.depths, default=-1) + 1
        if end > self._granted:
            return self._refuse(f"a growth to position {end} where {self._granted} was asked for")
        if not sequence.keyed_by_token and growth.base != sequence.base:
            return None  # the answer to an older advance
        grown = growth.tree.under(growth.path)
        if sequence.keyed_by_token:
            # Nobody asked for distributions, and the target refuses them in a tree that branches.
            grown = TokenTree(grown.token_ids, grown.parents)
        trie = self._trie.merge(grown.descend(sequence.ids[growth.base :]))
        if not sequence.keyed_by_token and not (trie.is_chain and len(trie) <= self._num_nodes):
            return self._refuse("growths that are not the chain that was asked for")
        self._trie = trie
        return None

    def _refuse(self, reason: str) -> None:
        self._growing, self._trie = False, EMPTY_TREE
        self._draft.set_aside(reason)

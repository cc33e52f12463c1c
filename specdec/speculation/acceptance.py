"""How likely the children of a node are, by their rank: what a draft's first, second, third guess is worth.

Knows ranks and the shapes of trees; refuses to know tokens, models and times. Both ends learn it from verdicts: a draft
grows where the text is likeliest to go, an orchestrator asks for what is worth a row. Under token and block
verification a proposal must not depend on this.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree

PRIOR = (0.7, 0.33, 0.22, 0.17, 0.13, 0.11, 0.1, 0.09)
"""How often a guess is right where those before it were wrong, until that is known. The first is what a good draft
reaches, the others are of a small model at temperature 1 (bench/LOG.md)."""

_PRIOR_TRIALS = 6
_CONFIDENCE_TRIALS = 12
"""That what is known of a rank counts for, beside what was seen of it where the draft was so sure."""
_MEMORY, _MEMORY_OF_ALL = 100, 500


class AcceptanceRate:
    """Of tokens that were tried; ``memory`` is about how many of them are remembered.

    It begins as if ``trials`` had been tried, a share of ``prior`` of them rightly.
    """

    __slots__ = ("_memory", "_right", "_tried")

    def __init__(self, memory: int, prior: float = 0.0, trials: float = 0.0) -> None:
        self._memory = memory
        self._right, self._tried = prior * trials, trials

    def observe(self, right: int, tried: int) -> None:
        """Of ``tried`` tokens in a row ``right`` were accepted."""
        forget = 1 - tried / self._memory
        self._right = forget * self._right + right
        self._tried = forget * self._tried + tried

    def forget(self, trials: float) -> None:
        """What was learnt counts no more than ``trials`` from now on."""
        forget = min(1.0, trials / max(1.0, self._tried))
        self._right, self._tried = forget * self._right, forget * self._tried

    def share(self, prior: float = 0.0, trials: float = 0.0) -> float:
        """Of those tried, from 0 to 1, believed as much as ``trials`` more with a share of ``prior``. Needs a trial."""
        return (self._right + trials * prior) / (self._tried + trials)


class AcceptanceModel:
    """Of every rank, how often that guess was right where those before it were wrong; and how much more often where the
    draft was surer, which is alike for all texts.

    ``of_all`` is what it begins with, and learns what is learnt here."""

    def __init__(self, of_all: AcceptanceModel | None = None) -> None:
        self._of_all = of_all
        if of_all is None:
            self._by_rank = [AcceptanceRate(_MEMORY_OF_ALL, share, _PRIOR_TRIALS) for share in PRIOR]
        else:
            self._by_rank = [AcceptanceRate(_MEMORY) for _ in PRIOR]
        self._by_confidence: dict[int, list[AcceptanceRate]] = {}  # of all
        self._num_observed = 0
        self._found: dict[int, list[float]] = {}
        self._found_after = 0  # observations of all texts

    def observe(self, tree: TokenTree, path: Sequence[int], ended: bool) -> None:
        """The nodes of ``path``, from the root down, were committed; ``ended``: and then no child of the last."""
        children: dict[int, list[int]] = {node: [] for node in (ROOT, *path)}
        for node, parent in enumerate(tree.parents):
            if parent in children:
                children[parent].append(node)
        for parent, right in itertools.zip_longest((ROOT, *path), path):
            if right is not None or ended:
                self._tried(tree, children[parent], right)

    def descended(self, tree: TokenTree, token_ids: Sequence[int]) -> TokenTree:
        """What is left of ``tree`` once these tokens were committed, whoever guessed them; learns which it had."""
        path = tree.trace(token_ids)
        self.observe(tree, path, ended=len(path) < len(token_ids))
        return tree.descend(token_ids)

    def _tried(self, tree: TokenTree, children: list[int], right: int | None) -> None:
        confidence = (
            next((tree.confidence[child] for child in children if tree.confidence[child]), 0) if tree.confidence else 0
        )
        for rank, child in enumerate(children[: len(PRIOR)]):
            self._observe(rank, confidence, child == right)
            if child == right:
                return

    def _observe(self, rank: int, confidence: int, right: bool) -> None:
        self._num_observed += 1
        self._by_rank[rank].observe(right, 1)
        if self._of_all is not None:
            self._of_all._observe(rank, confidence, right)
        elif confidence:
            self._rates_at(confidence)[rank].observe(right, 1)

    def _rates_at(self, confidence: int) -> list[AcceptanceRate]:
        if confidence not in self._by_confidence:
            self._by_confidence[confidence] = [AcceptanceRate(_MEMORY_OF_ALL) for _ in PRIOR]
        return self._by_confidence[confidence]

    def forget(self) -> None:
        """What was learnt here hardly counts from now on."""
        for acceptance in self._by_rank:
            acceptance.forget(_PRIOR_TRIALS)
        self._found.clear()

    def _share(self, rank: int) -> float:
        if self._of_all is None:
            return self._by_rank[rank].share()
        return self._by_rank[rank].share(self._of_all._share(rank), _PRIOR_TRIALS)

    @property
    def of_ranks(self) -> list[float]:
        """How often a node's first, second, ... child is right."""
        return self.at_confidence(0)

    def at_confidence(self, confidence: int) -> list[float]:
        """The same where the draft was so sure (specdec.core.tree.TokenTree), of this text; 0: as a rule."""
        num_observed = (self._of_all or self)._num_observed
        if num_observed != self._found_after:
            self._found, self._found_after = {}, num_observed
        if confidence not in self._found:
            wrong, least = 1.0, 1.0
            found: list[float] = []
            for rank in range(len(PRIOR)):
                share = self._share_at(rank, confidence)
                # None is likelier than the one before it, or what is likeliest of a tree would change their order.
                least = min(wrong * share, least)
                found.append(least)
                wrong *= 1.0 - share
            self._found[confidence] = found
        return self._found[confidence]

    def _share_at(self, rank: int, confidence: int) -> float:
        own, of_all = self._share(rank), self._of_all or self
        if not confidence:
            return own
        general = of_all._share(rank)
        share = of_all._rates_at(confidence)[rank].share(general, _CONFIDENCE_TRIALS)
        # What this text is, compared with all, is a factor of the odds.
        right, wrong = share * own * (1.0 - general), (1.0 - share) * (1.0 - own) * general
        return right / (right + wrong) if right + wrong else own

    def best(self, tree: TokenTree, num_nodes: int) -> TokenTree:
        """The part of ``tree`` that is likeliest to hold what is committed, likeliest nodes first."""
        if num_nodes >= len(tree) or tree.is_chain:
            return tree.prefix(num_nodes)
        return tree.part(self.likeliest(tree)[:num_nodes])

    def likeliest(self, tree: TokenTree) -> list[int]:
        """Its nodes, those first that are likeliest to be committed; so are those below any of them."""
        chances = self._of_nodes(tree)
        # A node is never likelier than its parent, which comes before it.
        return sorted(range(len(tree)), key=lambda node: -chances[node])

    def most_per_second(self, tree: TokenTree, rounds: Sequence[float]) -> TokenTree:
        """The part of ``tree``, a node at least, that promises the most tokens per second, where a round with 0, 1, ...
        nodes takes ``rounds`` seconds; no more nodes than that."""
        chances = self._of_nodes(tree)
        nodes = sorted(range(len(tree)), key=lambda node: -chances[node])[: len(rounds) - 1]
        expected = itertools.accumulate((chances[node] for node in nodes), initial=1.0)
        promised = [tokens / seconds for tokens, seconds in zip(expected, rounds, strict=False)]
        return tree.part(nodes[: promised.index(max(promised[1:]))]) if nodes else EMPTY_TREE

    def _of_nodes(self, tree: TokenTree) -> list[float]:
        """That each is committed."""
        num_children: Counter[int] = Counter()
        # A guess from elsewhere, among the draft's, knows nothing of this.
        confidences = {
            parent: confidence for parent, confidence in zip(tree.parents, tree.confidence, strict=False) if confidence
        }
        chances: list[float] = []
        for parent in tree.parents:
            rank = num_children[parent]
            num_children[parent] += 1
            above = 1.0 if parent == ROOT else chances[parent]
            of_ranks = self.at_confidence(confidences.get(parent, 0))
            chances.append(above * of_ranks[rank] if rank < len(of_ranks) else 0.0)
        return chances


def best_chances(of_ranks: Sequence[float]) -> Iterator[float]:
    """Of the first, second, ... node of the tree that is likeliest to hold what is committed, where any may grow."""
    heap = [(-of_ranks[0], 1.0, 0)]
    while True:
        chance, above, rank = heapq.heappop(heap)
        yield -chance
        heapq.heappush(heap, (chance * of_ranks[0], -chance, 0))
        if rank + 1 < len(of_ranks):
            heapq.heappush(heap, (-above * of_ranks[rank + 1], above, rank + 1))

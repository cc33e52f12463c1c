"""The acceptance model: probabilities that the draft's first, second, ... guess at a node is committed, by rank.

Knows ranks and the shapes of trees; does not know tokens, models or times. Draft and orchestrator both learn it from
verdicts: the draft to grow the most likely nodes, the orchestrator to request the nodes that are worth a row. Under
token and block verification a proposal must not depend on it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.speculation.cost import best_number, expected_tokens

PRIOR = (0.7, 0.33, 0.22, 0.17, 0.13, 0.11, 0.1, 0.09)
"""Initial share of right guesses per rank where all guesses of lower rank were wrong. The first is the acceptance of a
good draft, the others were measured with a small model at temperature 1 (bench/LOG.md, 2026-11-22)."""

_START_TRIALS, _PRIOR_TRIALS, _CONFIDENCE_TRIALS = 6, 12, 12
"""Weights of PRIOR, of what others' texts have shown as the prior of a text, and of a rank's share over all confidence
buckets as the prior of one bucket."""
_MEMORY_TRIALS, _MEMORY_TRIALS_OF_ALL = 100, 500
"""Memories of the statistics of one text, and of all texts."""
_MAX_CALLERS = 1024
"""Callers that are remembered, the latest ones."""

_CHANGE = 8.0
"""A text has changed when its latest trials are so much more likely, in nats, with another share."""


class AcceptanceRate:
    """The share of accepted tokens among those tried, with exponential forgetting over about ``memory`` tokens.

    It starts as if ``trials`` tokens had been tried, with a share of ``prior`` accepted.
    """

    __slots__ = ("_memory", "_right", "_tried")

    def __init__(self, memory: int, prior: float = 0.0, trials: float = 0.0) -> None:
        self._memory = memory
        self._right, self._tried = prior * trials, trials

    def observe(self, right: float, tried: float) -> None:
        """Count ``tried`` tokens, of which ``right`` were accepted."""
        forget = 1 - tried / self._memory
        self._right = forget * self._right + right
        self._tried = forget * self._tried + tried

    def share(self, prior: float = 0.0, trials: float = 0.0) -> float:
        """The accepted share, 0 to 1, with ``trials`` more tokens at a share of ``prior``. Needs at least one token."""
        return (self._right + trials * prior) / (self._tried + trials)


class _RateOfText(AcceptanceRate):
    """The share of one text, which may change: then what was observed before is forgotten. The prior counts as a part
    of what was observed. (Page 1954, cumulative sums, against half of the rights and half of the wrongs.)"""

    __slots__ = ("_prior_trials", "_since")

    def __init__(self) -> None:
        super().__init__(_MEMORY_TRIALS)
        self._prior_trials = float(_PRIOR_TRIALS)
        self._since = [(0.0, 0.0, 0.0)] * 2  # evidence of either change in nats, right and tried tokens since it began

    def observe(self, right: float, tried: float) -> None:
        usual = (self._right + 1) / (self._tried + 2)
        super().observe(right, tried)
        self._prior_trials *= 1 - tried / self._memory
        for index, share in enumerate((usual / 2, (1 + usual) / 2)):
            evidence, right_since, tried_since = self._since[index]
            evidence += right * math.log(share / usual) + (tried - right) * math.log((1 - share) / (1 - usual))
            since = (evidence, right_since + right, tried_since + tried) if evidence > 0 else (0.0, 0.0, 0.0)
            self._since[index] = since
            if evidence > _CHANGE:
                _, self._right, self._tried = since
                self._since, self._prior_trials = [(0.0, 0.0, 0.0)] * 2, 0.0
                return

    def forget(self) -> None:
        """Reduce the weight of all observations to that of a prior."""
        kept = min(1.0, _PRIOR_TRIALS / (self._tried + self._prior_trials))
        self._right, self._tried = kept * self._right, kept * self._tried
        self._prior_trials *= kept

    def with_prior(self, prior: float) -> float:
        return self.share(prior, self._prior_trials)


class AcceptanceModel:
    """The share of right guesses per rank where all lower ranks were wrong, with the effect of the confidence bucket.

    One model is per text, with ``of_all``, the model of all texts or of those of one caller, as its prior; ``of_all``
    also learns from its observations. The effect of the confidence bucket is the same for all texts."""

    def __init__(self, of_all: AcceptanceModel | None = None) -> None:
        self._of_all = of_all
        self._root: AcceptanceModel = self if of_all is None else of_all._root
        self._of_all_texts = [AcceptanceRate(_MEMORY_TRIALS_OF_ALL, share, _START_TRIALS) for share in PRIOR]
        self._of_text = [_RateOfText() for _ in PRIOR] if of_all is not None else []
        self._by_confidence: dict[int, list[AcceptanceRate]] = {}  # of all texts
        self._num_observed = 0
        self._found: dict[int, list[float]] = {}  # cache of at_confidence
        self._found_after = 0  # its age: observations of all texts

    def observe(self, tree: TokenTree, path: Sequence[int], ended: bool) -> None:
        """Learn that the nodes of ``path``, root downwards, are committed; ``ended``: no child of the last one is."""
        children: dict[int, list[int]] = {node: [] for node in (ROOT, *path)}
        for node, parent in enumerate(tree.parents):
            if parent in children:
                children[parent].append(node)
        for parent, right in itertools.zip_longest((ROOT, *path), path):
            if right is not None or ended:
                self._tried(tree, children[parent], right)

    def descended(self, tree: TokenTree, token_ids: Sequence[int]) -> TokenTree:
        """The rest of ``tree`` once these tokens are committed. Learns which of them the tree had."""
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
        if self._of_all is not None:
            self._of_text[rank].observe(right, 1)
            self._of_all._observe(rank, confidence, right)
            return
        self._of_all_texts[rank].observe(right, 1)
        if confidence:
            self._rates_at(confidence)[rank].observe(right, 1)

    def _rates_at(self, confidence: int) -> list[AcceptanceRate]:
        if confidence not in self._by_confidence:
            self._by_confidence[confidence] = [AcceptanceRate(_MEMORY_TRIALS_OF_ALL) for _ in PRIOR]
        return self._by_confidence[confidence]

    def forget(self) -> None:
        """Reduce the weight of all observations to that of a prior."""
        for acceptance in self._of_text:
            acceptance.forget()
        self._found.clear()

    def restart(self) -> None:
        """Forget all observations but those of ``of_all``."""
        self._of_text = [_RateOfText() for _ in self._of_text]
        self._found.clear()

    def _share(self, rank: int) -> float:
        if self._of_all is None:
            return self._of_all_texts[rank].share()
        return self._of_text[rank].with_prior(self._of_all._share(rank))

    @property
    def of_ranks(self) -> list[float]:
        """Probabilities that a node's first, second, ... child is committed, if the node is."""
        return self.at_confidence(0)

    def at_confidence(self, confidence: int) -> list[float]:
        """`of_ranks` of this text at one confidence bucket (specdec.core.tree.TokenTree); 0: over all buckets."""
        num_observed = self._root._num_observed
        if num_observed != self._found_after:
            self._found, self._found_after = {}, num_observed
        if confidence not in self._found:
            wrong, least = 1.0, 1.0
            found: list[float] = []
            for rank in range(len(PRIOR)):
                share = self._share_at(rank, confidence)
                # Probabilities must not rise with the rank, or `likeliest` would reorder siblings.
                least = min(wrong * share, least)
                found.append(least)
                wrong *= 1.0 - share
            self._found[confidence] = found
        return self._found[confidence]

    def _share_at(self, rank: int, confidence: int) -> float:
        own, of_all = self._share(rank), self._root
        if not confidence:
            return own
        general = of_all._share(rank)
        share = of_all._rates_at(confidence)[rank].share(general, _CONFIDENCE_TRIALS)
        # The difference between this text and all texts is a factor of the odds.
        right, wrong = share * own * (1.0 - general), (1.0 - share) * (1.0 - own) * general
        return right / (right + wrong) if right + wrong else own

    def best(self, tree: TokenTree, num_nodes: int) -> TokenTree:
        """The ``num_nodes`` nodes of ``tree`` with the highest probability to be committed, most likely first."""
        if num_nodes >= len(tree) or tree.is_chain:
            return tree.prefix(num_nodes)
        return tree.part(self.likeliest(tree)[:num_nodes])

    def likeliest(self, tree: TokenTree) -> list[int]:
        """The nodes of ``tree`` by falling probability to be committed. Parents come before their children."""
        chances = self._of_nodes(tree)
        # The sort is stable, and a node is at most as likely as its parent.
        return sorted(range(len(tree)), key=lambda node: -chances[node])

    def most_per_second(self, tree: TokenTree, rounds: Sequence[float]) -> TokenTree:
        """The part of ``tree`` with the most expected tokens per second, at least one node. ``rounds``: seconds that a
        round with 0, 1, ... nodes takes; its length limits the nodes."""
        chances = self._of_nodes(tree)
        nodes = sorted(range(len(tree)), key=lambda node: -chances[node])[: len(rounds) - 1]
        tokens = expected_tokens((chances[node] for node in nodes), len(nodes))
        return (
            tree.part(nodes[: best_number(tokens, rounds.__getitem__, range(1, len(tokens)))]) if nodes else EMPTY_TREE
        )

    def _of_nodes(self, tree: TokenTree) -> list[float]:
        """The probability of each node to be committed."""
        num_children: Counter[int] = Counter()
        # Nodes from other drafters have no confidence.
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


class CallersAcceptance:
    """The acceptance of the texts of each caller, the prior of its next one. That of all texts is the prior of a caller
    without texts, so a short answer does not begin with nothing."""

    def __init__(self) -> None:
        self.of_all = AcceptanceModel()
        self._of_callers: dict[bytes, AcceptanceModel] = {}  # the latest last

    def of_text(self, owner: bytes) -> AcceptanceModel:
        """For a new text of this caller."""
        of_caller = self._of_callers.pop(owner, None) or AcceptanceModel(self.of_all)
        self._of_callers[owner] = of_caller
        if len(self._of_callers) > _MAX_CALLERS:
            del self._of_callers[next(iter(self._of_callers))]
        return AcceptanceModel(of_caller)

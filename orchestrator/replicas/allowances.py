"""How much a replica may send: each message to it allows a number of entries, which its answers use up.

Knows sizes; does not know what the entries mean. Each node and id is an entry, and a message around them costs as much
as MESSAGE entries. A replica that sends more breaks the contract, so what waits for a sequence is never more than was
asked for.
"""

from __future__ import annotations

from specdec.core.rounds import Budget, Round
from specdec.core.tree import MAX_TREE_NODES
from specdec.transport.wire import MAX_SUPPORT
from specdec.v1 import common_pb2, draft_pb2, target_pb2

MESSAGE = 16
"""Entries that a verdict, a growth or an error counts for next to its nodes and ids."""

SPARE = MAX_TREE_NODES
"""Entries that are allowed to each sequence anyway: for its error, and for nodes that a draft sends again."""

_HALF_LIFE_S = 60.0

_HEARTBEATS_PER_S, _MAX_UNUSED_HEARTBEATS = 100.0, 1000.0
"""Four per second are due. After this process stood still, many are read at once."""


def of_round(round_: Round, num_logprobs: int | None = None) -> int:
    """Entries of the verdicts that a round allows. An open is a round with an empty tree. ``num_logprobs``: as in
    TargetOpen."""
    num_verdicts = 1 + round_.num_autonomous
    num_tokens = num_verdicts + len(round_.tree) + num_verdicts * round_.self_draft_nodes
    self_drafts = num_verdicts * 2 * round_.self_draft_nodes  # each tree, and its accepted nodes
    return MESSAGE * num_verdicts + len(round_.tree) + self_drafts + _of_logprobs(num_tokens, num_logprobs)


def of_prompt(num_prompt_tokens: int, num_logprobs: int | None) -> int:
    """Entries of the logprobs of a prompt, in messages of some hundred tokens each."""
    return _of_logprobs(num_prompt_tokens, num_logprobs) + MESSAGE * (1 + num_prompt_tokens // 256)


def _of_logprobs(num_tokens: int, num_top: int | None) -> int:
    return 0 if num_top is None else num_tokens * (1 + num_top)


def size_of_logprobs(logprobs: common_pb2.Logprobs) -> int:
    return len(logprobs.logprobs) + max(len(logprobs.top_ids), len(logprobs.top_logprobs))


def of_budget(budget: Budget, num_levels: int, with_probs: bool) -> int:
    """Entries of the growths that an advance allows. ``num_levels``: below its base, nodes requested earlier included.
    ``with_probs``: nodes have the distributions they are drawn from.

    The requested nodes come in one growth, below what is left of earlier ones. Each node grown ahead may come in a
    growth of its own with all nodes above it. A last growth has the end.
    """
    requested = budget.max_nodes * (1 + budget.max_siblings)
    probs = budget.max_nodes * (1 + MAX_SUPPORT) if with_probs else 0
    return requested + probs + num_levels + (budget.max_ahead + 2) * (MESSAGE + num_levels)


def size_of_verdict(verdict: target_pb2.Verdict) -> int:
    num_nodes = len(verdict.accepted) + _num_nodes(verdict.self_draft)
    return MESSAGE + num_nodes + size_of_logprobs(verdict.logprobs)


def size_of_growth(growth: draft_pb2.Growth) -> int:
    tree = growth.tree
    return MESSAGE + len(growth.path) + _num_nodes(tree)


def _num_nodes(tree: common_pb2.TokenTree) -> int:
    """Its entries: nodes, and the ids of their distributions."""
    num_nodes = max(len(tree.token_ids), len(tree.parents), len(tree.confidence))
    return num_nodes + sum(1 + max(len(d.token_ids), len(d.weights)) for d in tree.draft_probs)


class Leftover:
    """What closed sequences were allowed and have not used. What was in transit arrives within seconds, so it halves
    every _HALF_LIFE_S."""

    def __init__(self, now: float) -> None:
        self._left, self._at = 0.0, now

    def add_unused(self, entries: int, now: float) -> None:
        self._left = self._left * 0.5 ** ((now - self._at) / _HALF_LIFE_S) + entries
        self._at = now

    def use(self, size: int) -> int:
        """What is left after ``size`` entries; below 0: they were too many."""
        self._left -= size
        return int(self._left)


class Heartbeats:
    """The allowance of a stream for frames that answer nothing. It grows with time."""

    def __init__(self, now: float) -> None:
        self._left = _MAX_UNUSED_HEARTBEATS
        self._at = now

    def use(self, share: float, now: float) -> bool:
        """Use up ``share`` of a heartbeat that names all sequences. False: the allowance is used up."""
        self._left = min(_MAX_UNUSED_HEARTBEATS, self._left + (now - self._at) * _HEARTBEATS_PER_S) - share
        self._at = now
        return self._left >= 0

"""What a round gives and takes: its expected tokens, its seconds, and the number of draft tokens with the best ratio.

    goodput(k) = E[accepted(k) + 1] / (drafting(k) + overhead + pass(n (k + 1)))

This is the formula of the policy (orchestrator/control), of `specdec plan` and of the benchmarks. All n sequences of a
pass have equally many draft tokens. The policy counts the rows of a draft token and the interference of the draft with
the target, as measured (DraftLength.goodput). Knows probabilities and seconds; does not know how they were measured.
(Goodput: Liu et al. 2024, "Optimizing Speculative Decoding for Serving LLMs Using Goodput".)
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple


class Round(NamedTuple):
    """Expected tokens and seconds of a round of one sequence."""

    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def chain_chances(rank_rates: Sequence[float], num_siblings: int = 0) -> Iterator[float]:
    """Probabilities that the first, second, ... token of a chain is committed, without end. ``rank_rates``: those of a
    node's first, second, ... child, if the node is committed. A sibling may be right, but leads no further."""
    first = sum(rank_rates[: 1 + num_siblings])
    return itertools.accumulate(itertools.repeat(rank_rates[0]), operator.mul, initial=first)


def tree_chances(rank_rates: Sequence[float]) -> Iterator[float]:
    """Probabilities of the first, second, ... node of the most likely tree, of unlimited size."""
    heap = [(-rank_rates[0], 1.0, 0)]
    while True:
        chance, above, rank = heapq.heappop(heap)
        yield -chance
        heapq.heappush(heap, (chance * rank_rates[0], -chance, 0))
        if rank + 1 < len(rank_rates):
            heapq.heappush(heap, (-above * rank_rates[rank + 1], above, rank + 1))


def expected_tokens(chances: Iterable[float], max_nodes: int) -> list[float]:
    """Tokens of a round with 0, 1, ... ``max_nodes`` draft tokens, of which each is committed with its probability.
    Those beyond ``chances`` give none."""
    padded = itertools.chain(chances, itertools.repeat(0.0))
    return list(itertools.accumulate(itertools.islice(padded, max_nodes), initial=1.0))


def best_number(tokens: Sequence[float], seconds: Callable[[int], float], numbers: Iterable[int]) -> int:
    """Of ``numbers`` of draft tokens the one with the most tokens per second; the first of equal ones."""
    return max(numbers, key=lambda number: tokens[number] / seconds(number))


def mean_round(hit: Round, miss: Round, hit_rate: float) -> Round:
    """The mean of rounds of which a share of ``hit_rate`` finds its draft tokens already there."""
    miss_rate = 1 - hit_rate
    return Round(
        hit_rate * hit.tokens + miss_rate * miss.tokens,
        hit_rate * hit.seconds + miss_rate * miss.seconds,
    )


def waiting_share(hit_rate: float, num_late: int) -> float:
    """The share of rounds that wait for a draft that grows ahead. ``num_late``: passes of the target after which the
    draft's answer arrives. A tree that was waited for is followed at once by what has grown below it. After a hit the
    draft must first hear of it. Beyond a pass it hears too late, and two hits never follow each other."""
    return 1 - hit_rate if num_late <= 1 else 1 / (1 + hit_rate)


def ahead_round(
    drafted: Round, wait_s: float, hit_rate: float, first_rate: float, num_late: int, num_sequences: int = 1
) -> Round:
    """The mean round where the draft grows ahead: after a miss it waits, or continues without draft tokens until a tree
    arrives, whichever is faster.

    ``drafted``: a round that does not wait. A pass waits for all its ``num_sequences``. A round without draft tokens
    takes equally long and gives one token. The tree that grows below that token arrives ``num_late`` rounds later. It
    is usable if it holds all tokens since, each with probability ``first_rate``. Its next trees are hits again.
    """
    waits = waiting_share(hit_rate**num_sequences, num_late)
    waiting = drafted if not waits else Round(drafted.tokens, drafted.seconds + waits * wait_s)
    if not first_rate:
        return waiting
    num_alone = (1 - hit_rate) * (num_late - 1 + first_rate**-num_late)  # rounds without draft tokens, per other round
    continuing = Round((drafted.tokens + num_alone) / (1 + num_alone), drafted.seconds)
    return max(waiting, continuing, key=lambda mean: mean.tokens_per_s)

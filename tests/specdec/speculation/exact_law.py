"""The exact joint law of a verifier's output, by full enumeration of drafts, accept decisions and continuations.

`output_law` treats a verifier as a black box: it finds by bisection where the answer changes with each accept
uniform and sums over the cells between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.speculation.verification import verify_block, verify_token

Verifier = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[int, Tensor]]


def of_one(verify: Callable[..., tuple[list[int], Tensor]]) -> Verifier:
    """``verify`` for a single chain: the number accepted, and weights [vocab] of the token after them."""

    def verify_one(target: Tensor, draft: Tensor, token_ids: Tensor, uniforms: Tensor) -> tuple[int, Tensor]:
        [num_accepted], [weights] = verify(target, draft, token_ids.tolist(), uniforms, [len(token_ids)])
        return num_accepted, weights

    return verify_one


BOTH = pytest.mark.parametrize("verify", [of_one(verify_token), of_one(verify_block)], ids=["token", "block"])
TOLERANCE = 1e-9


@dataclass
class Pair:
    """Two language models as tables: the next-token distribution after every prefix of up to K tokens."""

    vocab_size: int
    num_draft_tokens: int
    target: dict[tuple[int, ...], np.ndarray]
    draft: dict[tuple[int, ...], np.ndarray]

    def rows(self, model: dict[tuple[int, ...], np.ndarray], path: tuple[int, ...], num_rows: int) -> Tensor:
        if num_rows == 0:
            return torch.zeros(0, self.vocab_size, dtype=torch.float64)
        return torch.tensor(np.array([model[path[:i]] for i in range(num_rows)]))

    def paths(self, length: int) -> Iterator[tuple[int, ...]]:
        return itertools.product(range(self.vocab_size), repeat=length)

    def law(self, model: dict[tuple[int, ...], np.ndarray], path: tuple[int, ...], start: int = 0) -> float:
        return float(np.prod([model[path[:i]][path[i]] for i in range(start, len(path))]))


def random_row(rng: np.random.Generator, vocab_size: int, kind: str) -> np.ndarray:
    row = rng.dirichlet(np.full(vocab_size, 0.7))
    if kind == "sparse":  # zero mass here and there
        row[rng.random(vocab_size) < 0.4] = 0.0
        row[rng.integers(vocab_size)] += 0.1
    if kind == "one-hot":
        row = np.eye(vocab_size)[rng.integers(vocab_size)]
    return row / row.sum()


def random_pair(
    seed: int, vocab_size: int, num_draft_tokens: int, target_kind: str = "dense", draft_kind: str = "dense"
) -> Pair:
    """Every row depends on its whole prefix, so that an answer from the wrong row shows."""
    rng = np.random.default_rng(seed)
    pair = Pair(vocab_size, num_draft_tokens, {}, {})
    for length in range(num_draft_tokens + 1):
        for prefix in pair.paths(length):
            pair.target[prefix] = random_row(rng, vocab_size, target_kind)
            pair.draft[prefix] = random_row(rng, vocab_size, draft_kind)
    return pair


def constant_pair(target: list[float], draft: list[float], num_draft_tokens: int) -> Pair:
    pair = Pair(len(target), num_draft_tokens, {}, {})
    for length in range(num_draft_tokens + 1):
        for prefix in pair.paths(length):
            pair.target[prefix], pair.draft[prefix] = np.array(target), np.array(draft)
    return pair


ALMOST_ONE = 1.0 - 2.0**-40


def cells(answer: Callable[[list[float]], int], num_uniforms: int) -> Iterator[tuple[float, list[float]]]:
    """Boxes of accept uniforms in which the answer is constant: (volume, a point inside)."""
    edges: list[list[float]] = []
    for i in range(num_uniforms):
        cuts = set()
        for others in itertools.product([0.0, ALMOST_ONE], repeat=num_uniforms - 1):

            def at(uniform: float, i: int = i, others: tuple[float, ...] = others) -> int:
                return answer([*others[:i], uniform, *others[i:]])

            low, high = 0.0, ALMOST_ONE
            if (start := at(low)) == at(high):
                continue
            while high - low > 1e-11:
                middle = 0.5 * (low + high)
                low, high = (middle, high) if at(middle) == start else (low, middle)
            cuts.add(0.5 * (low + high))
        edges.append([0.0, *sorted(cuts), 1.0])
    for box in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
        yield float(np.prod([high - low for low, high in box])), [0.5 * (low + high) for low, high in box]


def output_law(verify: Verifier, pair: Pair) -> tuple[np.ndarray, float]:
    """The joint law of the first K + 1 output tokens, [vocab] * (K + 1), and the expected number accepted.

    After the token that follows the accepted ones the target goes on alone.
    """
    num_draft_tokens = pair.num_draft_tokens
    law = np.zeros([pair.vocab_size] * (num_draft_tokens + 1))
    expected_accepted = 0.0
    for drafted in pair.paths(num_draft_tokens):
        chance = pair.law(pair.draft, drafted)
        if chance == 0.0:
            continue
        target_probs = pair.rows(pair.target, drafted, num_draft_tokens + 1)
        draft_probs = pair.rows(pair.draft, drafted, num_draft_tokens)
        token_ids = torch.tensor(drafted, dtype=torch.int64)

        def answer(point: list[float], rows=(target_probs, draft_probs, token_ids)) -> tuple[int, Tensor]:
            return verify(*rows, torch.tensor(point, dtype=torch.float64))

        for volume, point in cells(lambda point: answer(point)[0], num_draft_tokens):
            num_accepted, weights = answer(point)
            assert weights.shape == (pair.vocab_size,)
            expected_accepted += chance * volume * num_accepted
            for token, prob in enumerate((weights / weights.sum()).tolist()):
                emitted = (*drafted[:num_accepted], token)
                for rest in pair.paths(num_draft_tokens - num_accepted):
                    going_on = pair.law(pair.target, emitted + rest, start=len(emitted)) if prob else 0.0
                    law[emitted + rest] += chance * volume * prob * going_on
    return law, expected_accepted


def error(verify: Verifier, pair: Pair) -> float:
    """How far the output is from the target's law: the largest difference over all sequences."""
    law, _ = output_law(verify, pair)
    expected = [pair.law(pair.target, path) for path in pair.paths(pair.num_draft_tokens + 1)]
    return float(np.abs(law.ravel() - np.array(expected)).max())

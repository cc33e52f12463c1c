"""Knows the random number of every (seed, position, base, token id, domain); refuses to know what it decides.

Nothing here has a state: a number is a pure function of its key, so that draft and target, CPU and GPU, first
run and replay see the same bits. The generator is Philox4x32-10 (`specdec.core.philox`):

    key     = the 64-bit seed as two 32-bit words, low word first
    counter = (position, base, token_id // 4, domain); token_id takes word token_id % 4 of the output
    u       = (word + 0.5) * 2**-32 in float64, which is never 0 and never 1
    E       = -log1p(-u), a standard exponential, finite and positive

All draws are exponential races over E (see `sampling.race`); accept decisions use u itself. A call serves the rows of
any number of sequences: small calls cost much more per number. torch and numpy are imported only where tensors are
made, because the orchestrator derives seeds and runs without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from specdec.core.philox import WORD_BITS, WORD_MASK, philox, philox_array

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Domain(IntEnum):
    """What a number is for. Numbers of different domains are independent."""

    COUPLED = 0  # the race shared by draft and target
    DRAFT = 1  # the draft's own draws under token and block verification
    ACCEPT = 2  # the accept decisions of token and block verification
    CORRECTION = 3  # the correction or bonus of token and block verification
    SEED = 4  # seeds of further samples


class Key(NamedTuple):
    """Where the numbers of one row come from."""

    seed: int
    position: int
    base: int = 0  # without meaning for Domain.COUPLED


_CACHED_QUADS = 1 << 14

LOG_RANGE = 26.01
"""More than the logarithms of two exponentials can lie apart: as u is at least 2**-33 and at most 1 - 2**-33, E is at
least 2**-33 and at most 33 log 2."""


def exponentials(
    keys: Sequence[Key], domain: Domain, vocab_size: int, device: torch.device | str | None = None
) -> Tensor:  # [keys, vocab_size] float64
    """Standard exponentials of every token id, a row per key."""
    import torch

    num_quads = (vocab_size + 3) // 4
    quads = torch.arange(num_quads, device=device)[None, :]  # [1, quads]
    numbers = torch.empty(len(keys), num_quads, 4, dtype=torch.float64, device=device)
    # A few rows at a time, so that what lies between the counters and the numbers stays in the processor's cache.
    num_rows = max(1, _CACHED_QUADS // max(1, num_quads))
    for start in range(0, len(keys), num_rows):
        some = numbers[start : start + num_rows]  # [rows, quads, 4]
        rows = torch.arange(len(some), device=device)[:, None]  # [rows, 1]
        some.copy_(_words(keys[start : start + num_rows], rows, quads, domain).movedim(0, -1))
        _exponential(_uniform(some))
    return numbers.flatten(1)[:, :vocab_size]


def exponentials_at(keys: Sequence[Key], rows: Tensor, token_ids: Tensor, domain: Domain) -> Tensor:  # [n] float64
    """Number i is entry token_ids[i] of row rows[i] of `exponentials`, without the cost of the rows.

    rows [n] index ``keys``. A number here costs about four times what it costs in a whole row.
    """
    lanes = _words(keys, rows, token_ids // 4, domain)  # [4, n]
    return _exponential(_uniform(lanes.gather(0, (token_ids % 4)[None, :])[0].double()))


def uniforms(keys: Sequence[Key], domain: Domain) -> Tensor:  # [keys] float64
    """One uniform per key, strictly between 0 and 1."""
    import torch

    rows = torch.arange(len(keys))  # [keys]
    return _uniform(_words(keys, rows, torch.zeros_like(rows), domain)[0].double())


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request: the request's own for sample 0, then 64 unrelated bits."""
    if index == 0:
        return seed
    low, high, _, _ = philox((index, 0, 0, int(Domain.SEED)), _halves(seed))
    return high << WORD_BITS | low


def _words(keys: Sequence[Key], rows: Tensor, quads: Tensor, domain: Domain) -> Tensor:  # [4, ...] int64
    """The words of quads [...] in the rows that rows [...] name; the two broadcast."""
    import numpy as np
    import torch

    # Coupled noise belongs to the absolute position alone: if it changed with where a round happened to
    # start, the text would depend on the drafter. This is the only place that knows.
    bases = [0 if domain is Domain.COUPLED else key.base for key in keys]
    positions = [key.position for key in keys]
    halves = [_halves(key.seed) for key in keys]
    table = np.array([positions, bases, [low for low, _ in halves], [high for _, high in halves]], np.uint64)
    if rows.device.type == "cpu":
        position, base, low, high = table[:, rows.numpy()]  # each [...]
        counter = position, base, quads.numpy().view(np.uint64), int(domain)
        return torch.from_numpy(philox_array(counter, (low, high)))
    there = torch.from_numpy(table.view(np.int64)).to(rows.device)[:, rows]
    domains = quads.new_full((), int(domain))
    words = philox((there[0], there[1], quads, domains), (there[2], there[3]))
    return torch.stack([word + torch.zeros_like(rows + quads) for word in words])


def _halves(seed: int) -> tuple[int, int]:
    # A seed out of range would alias another one in silence.
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an unsigned 64-bit number, not {seed}")
    return seed & WORD_MASK, seed >> WORD_BITS


def _uniform(words: Tensor) -> Tensor:  # same shape; overwrites its argument, float64
    # Exact in float64 (33 bits). A float32 would round up to 1.0 now and then, and log1p(-1) is infinite.
    return words.add_(0.5).mul_(2.0**-32)


def _exponential(uniform: Tensor) -> Tensor:  # same shape; overwrites its argument
    return uniform.neg_().log1p_().neg_()

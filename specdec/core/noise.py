"""Keyed noise: the random number of every (seed, position, base, token id, domain).

A number is a pure function of its key, without state: draft and target, CPU and GPU, first run and replay get the
same bits. The generator is Philox4x32-10 (`specdec.core.philox`):

    key     = the 64-bit seed as two 32-bit words, low word first
    counter = (position, base, token_id // 4, domain); token_id takes word token_id % 4 of the output
    u       = (word + 0.5) * 2**-32 in float64, which is never 0 and never 1
    E       = -log1p(-u), a standard exponential, finite and positive

All draws are exponential races over E (`specdec.sampling.distributions.race`); accept decisions use u itself. One
call serves the rows of many sequences, because small calls cost much more per number. Only the functions that make
tensors import torch and numpy: the orchestrator derives seeds and runs without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from specdec.core.device import sent
from specdec.core.philox import WORD_BITS, WORD_MASK, philox, philox_array

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Domain(IntEnum):
    """Purpose of a number. Numbers of different domains are independent."""

    COUPLED = 0  # the race shared by draft and target
    DRAFT = 1  # the draft's own draws under token and block verification
    ACCEPT = 2  # the accept decisions of token and block verification
    CORRECTION = 3  # the correction or bonus of token and block verification
    SEED = 4  # seeds of further samples


class Key(NamedTuple):
    """Key of the numbers of one row."""

    seed: int
    position: int
    base: int = 0  # ignored for Domain.COUPLED


_CACHED_QUADS = 1 << 14
"""Chunk limit on a CPU. On other devices the caller's is enough (specdec.backends.base.BYTES_PER_LOGIT)."""

LOG_RANGE = 26.01
"""Upper bound of the distance between the logarithms of two exponentials: u lies between 2**-33 and 1 - 2**-33, so E
lies between 2**-33 and 33 log 2."""


def exponentials(
    keys: Sequence[Key], domain: Domain, vocab_size: int, device: torch.device | str | None = None
) -> Tensor:  # [keys, vocab_size] float64
    """Standard exponentials of every token id, one row per key."""
    import torch

    num_quads = (vocab_size + 3) // 4
    quads = torch.arange(num_quads, device=device)[None, :]  # [1, quads]
    numbers = torch.empty(len(keys), num_quads, 4, dtype=torch.float64, device=device)
    # On a CPU a few rows at a time, so that the intermediate arrays stay in its cache.
    num_rows = max(1, _CACHED_QUADS // max(1, num_quads)) if numbers.device.type == "cpu" else max(1, len(keys))
    for start in range(0, len(keys), num_rows):
        chunk = numbers[start : start + num_rows]  # [rows, quads, 4]
        rows = torch.arange(len(chunk), device=device)[:, None]  # [rows, 1]
        chunk.copy_(_words(keys[start : start + num_rows], rows, quads, domain=domain).movedim(0, -1))
        _exponential(_uniform(chunk))
    return numbers.flatten(1)[:, :vocab_size]


def exponentials_at(keys: Sequence[Key], rows: Tensor, token_ids: Tensor, domain: Domain) -> Tensor:  # [n] float64
    """Single entries of `exponentials`: number i is entry token_ids[i] of row rows[i].

    rows [n] index ``keys``. A number costs about four times as much as in a whole row.
    """
    lanes = _words(keys, rows, token_ids // 4, domain=domain)  # [4, n]
    return _exponential(_uniform(lanes.gather(0, (token_ids % 4)[None, :])[0].double()))


def exponentials_of(key: Key, domain: Domain, token_ids: Sequence[int]) -> list[float]:
    """Some entries of the row of `exponentials` with this key, without torch."""
    import numpy as np

    tokens = np.array(token_ids, np.uint64)
    check_position(key.position)
    low, high = (np.full(len(tokens), half, np.uint64) for half in _halves(key.seed))
    lanes = philox_array((key.position, _base(key, domain), tokens // np.uint64(4), int(domain)), (low, high))  # [4, n]
    words = lanes[(tokens % np.uint64(4)).astype(np.int64), np.arange(len(tokens))]
    numbers: list[float] = (-np.log1p(-((words + 0.5) * 2.0**-32))).tolist()
    return numbers


def uniforms(keys: Sequence[Key], domain: Domain) -> Tensor:  # [keys] float64
    """One uniform per key, strictly between 0 and 1."""
    import torch

    rows = torch.arange(len(keys))  # [keys]
    return _uniform(_words(keys, rows, torch.zeros_like(rows), domain=domain)[0].double())


def check_position(position: int) -> None:
    """Raises ValueError for a position before the text, which would silently give the numbers of another one."""
    if position < 0:
        raise ValueError(f"position must be 0 or more, not {position}")


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request: the request's seed for sample 0, else 64 independent bits."""
    if index == 0:
        return seed
    low, high, _, _ = philox((index, 0, 0, int(Domain.SEED)), _halves(seed))
    return high << WORD_BITS | low


def _words(keys: Sequence[Key], rows: Tensor, quads: Tensor, *, domain: Domain) -> Tensor:  # [4, ...] int64
    """The four words of each quad in quads [...], with the keys at rows [...]; the two broadcast."""
    import numpy as np
    import torch

    bases = [_base(key, domain) for key in keys]
    positions = [key.position for key in keys]
    check_position(min(positions, default=0))
    halves = [_halves(key.seed) for key in keys]
    table = np.array([positions, bases, [low for low, _ in halves], [high for _, high in halves]], np.uint64)
    if rows.device.type == "cpu":
        position, base, low, high = table[:, rows.numpy()]  # each [...]
        counter = position, base, quads.numpy().view(np.uint64), int(domain)
        return torch.from_numpy(philox_array(counter, (low, high)))
    columns = sent(torch.from_numpy(table.view(np.int64)), rows.device)[:, rows]
    domains = quads.new_full((), int(domain))
    words = philox((columns[0], columns[1], quads, domains), (columns[2], columns[3]))
    return torch.stack([word + torch.zeros_like(rows + quads) for word in words])


def _base(key: Key, domain: Domain) -> int:
    # Coupled noise depends on the absolute position, not on the base of the round; otherwise the text would
    # depend on the draft. Only this line implements that rule.
    return 0 if domain is Domain.COUPLED else key.base


def _halves(seed: int) -> tuple[int, int]:
    # A seed out of range would silently give the numbers of another seed.
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an unsigned 64-bit number, not {seed}")
    return seed & WORD_MASK, seed >> WORD_BITS


def _uniform(words: Tensor) -> Tensor:  # same shape; overwrites its argument, float64
    # Exact in float64 (33 bits). float32 would sometimes round up to 1.0, and log1p(-1) is infinite.
    return words.add_(0.5).mul_(2.0**-32)


def _exponential(uniform: Tensor) -> Tensor:  # same shape; overwrites its argument
    return uniform.neg_().log1p_().neg_()

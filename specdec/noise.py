"""Knows the random number of every (seed, position, base, token id, domain); refuses to know what it decides.

Nothing here has a state: a number is a pure function of its key, so that draft and target, CPU and GPU, first
run and replay see the same bits. The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011):

    key     = the 64-bit seed as two 32-bit words, low word first
    counter = (position, base, token_id // 4, domain); token_id takes word token_id % 4 of the output
    u       = (word + 0.5) * 2**-32 in float64, which is never 0 and never 1
    E       = -log1p(-u), a standard exponential, finite and positive

All draws are exponential races over E (see `sampling.race`); accept decisions use u itself. torch is imported
only where tensors are made, because the orchestrator derives seeds and runs without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WORD_BITS = 32
_WORD_MASK = 0xFFFFFFFF
_NUM_ROUNDS = 10

# Philox multiplies 32-bit words into unsigned 64-bit products, which int64 cannot hold. With the multiplier
# less 2**32, a negative number, the product fits: same low word, high word too small by the other factor.
_MULTIPLIER_0 = 0xD2511F53 - 2**32
_MULTIPLIER_1 = 0xCD9E8D57 - 2**32
_KEY_STEP_0 = 0x9E3779B9
_KEY_STEP_1 = 0xBB67AE85

# Broadcastable words: the same lines serve plain ints and int64 tensors.
_Words = TypeVar("_Words", int, "Tensor")


class Domain(IntEnum):
    """What a number is for. Numbers of different domains are independent."""

    COUPLED = 0  # the race shared by draft and target
    DRAFT = 1  # the draft's own draws under token and block verification
    ACCEPT = 2  # the accept decisions of token and block verification
    CORRECTION = 3  # the correction or bonus of token and block verification
    SEED = 4  # seeds of further samples


def exponentials(
    seed: int,
    positions: Sequence[int],
    base: int,
    domain: Domain,
    vocab_size: int,
    device: torch.device | str | None = None,
) -> Tensor:  # [len(positions), vocab_size] float64
    """Standard exponentials of every token id at these positions."""
    import torch

    rows = torch.tensor(positions, dtype=torch.int64, device=device)[:, None]  # [rows, 1]
    quads = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=device)[None, :]  # [1, quads]
    lanes = torch.stack(_words(seed, rows, base, quads, domain), dim=-1)  # [rows, quads, 4]
    return _exponential(_uniform(lanes.flatten(1)))[:, :vocab_size]


def exponentials_at(seed: int, position: int, base: int, domain: Domain, token_ids: Tensor) -> Tensor:  # [n] float64
    """The entries of one row of `exponentials` at token_ids [n], without the cost of the row."""
    import torch

    row = torch.tensor(position, dtype=torch.int64, device=token_ids.device)  # []
    token_ids = token_ids.to(torch.int64)
    lanes = torch.stack(_words(seed, row, base, token_ids // 4, domain))  # [4, n]
    words = lanes.gather(0, (token_ids % 4)[None, :])[0]  # [n]
    return _exponential(_uniform(words))


def uniforms(seed: int, positions: Sequence[int], base: int, domain: Domain) -> Tensor:  # [len(positions)] float64
    """One uniform per position, strictly between 0 and 1."""
    import torch

    rows = torch.tensor(positions, dtype=torch.int64)  # [rows]
    return _uniform(_words(seed, rows, base, torch.zeros_like(rows), domain)[0])


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request: the request's own for sample 0, then 64 unrelated bits."""
    if index == 0:
        return seed
    low, high, _, _ = philox((index, 0, 0, int(Domain.SEED)), _key(seed))
    return high << _WORD_BITS | low


def philox(
    counter: tuple[_Words, _Words, _Words, _Words], key: tuple[int, int]
) -> tuple[_Words, _Words, _Words, _Words]:
    """Philox4x32-10 of 32-bit words held in ints or in int64 tensors, which broadcast against each other."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        high_0 = (product_0 >> _WORD_BITS) + word_0
        high_1 = (product_1 >> _WORD_BITS) + word_2
        word_0, word_1, word_2, word_3 = (
            high_1 ^ (word_1 ^ key_0),
            product_1 & _WORD_MASK,
            high_0 ^ (word_3 ^ key_1),
            product_0 & _WORD_MASK,
        )
        key_0 = (key_0 + _KEY_STEP_0) & _WORD_MASK
        key_1 = (key_1 + _KEY_STEP_1) & _WORD_MASK
    return word_0, word_1, word_2, word_3


def _words(
    seed: int, positions: Tensor, base: int, quads: Tensor, domain: Domain
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # each int64, of the shape of positions and quads broadcast
    # Coupled noise belongs to the absolute position alone: if it changed with where a round happened to
    # start, the text would depend on the drafter. This is the only place that knows.
    if domain is Domain.COUPLED:
        base = 0
    bases = positions.new_full((), base)  # []
    domains = positions.new_full((), int(domain))  # []
    return philox((positions, bases, quads, domains), _key(seed))


def _key(seed: int) -> tuple[int, int]:
    # A seed out of range would alias another one in silence.
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an unsigned 64-bit number, not {seed}")
    return seed & _WORD_MASK, seed >> _WORD_BITS


def _uniform(words: Tensor) -> Tensor:  # same shape, float64
    # Exact in float64 (33 bits). A float32 would round up to 1.0 now and then, and log1p(-1) is infinite.
    return words.double().add_(0.5).mul_(2.0**-32)


def _exponential(uniform: Tensor) -> Tensor:  # same shape; overwrites its argument
    return uniform.neg_().log1p_().neg_()

"""The generator Philox4x32-10, for ints, tensors and arrays.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. All three give the same bits. The orchestrator
uses ints, as it has neither torch nor numpy. Tensors serve any device. Arrays serve the CPU, where torch's overhead
per operation dominates the cost of few numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

WORD_BITS = 32
WORD_MASK = 0xFFFFFFFF
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

# Broadcastable words: one implementation for plain ints and int64 tensors.
_Words = TypeVar("_Words", int, "Tensor")


def philox(
    counter: tuple[_Words, _Words, _Words, _Words], key: tuple[Any, Any]
) -> tuple[_Words, _Words, _Words, _Words]:
    """Four output words per counter of four words. Words are 32 bits in ints or int64 tensors, which broadcast."""
    # The product of two words needs 64 unsigned bits, more than int64 has. With 2**32 subtracted from the multiplier,
    # which makes it negative, the product fits: same low word, high word too small by the other factor.
    multiplier_0, multiplier_1 = (multiplier - 2**WORD_BITS for multiplier in _MULTIPLIERS)
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = word_0 * multiplier_0
        product_1 = word_2 * multiplier_1
        high_0 = (product_0 >> WORD_BITS) + word_0
        high_1 = (product_1 >> WORD_BITS) + word_2
        word_0, word_1, word_2, word_3 = (
            high_1 ^ (word_1 ^ key_0),
            product_1 & WORD_MASK,
            high_0 ^ (word_3 ^ key_1),
            product_0 & WORD_MASK,
        )
        key_0 = (key_0 + _KEY_STEPS[0]) & WORD_MASK
        key_1 = (key_1 + _KEY_STEPS[1]) & WORD_MASK
    return word_0, word_1, word_2, word_3


def philox_array(
    counter: tuple[Any, Any, Any, Any], key: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:  # [4, ...] int64
    """`philox` in numpy. Words are uint64 arrays or ints, which broadcast to [...]; both key words have one shape.

    Words 0 and 2, which are multiplied, share one array, and words 1 and 3 another. So a round takes five numpy
    calls and allocates nothing.
    """
    import numpy as np

    shape = np.broadcast_shapes(*(np.shape(word) for word in (*counter, *key)))
    factors, others, products = (np.empty((2, *shape), np.uint64) for _ in range(3))
    factors[0], others[0], factors[1], others[1] = counter
    bits, mask = np.uint64(WORD_BITS), np.uint64(WORD_MASK)
    multipliers = np.array(_MULTIPLIERS, np.uint64).reshape(2, *(1 for _ in shape))
    first = np.stack(key)  # [2, ...]
    steps = np.multiply.outer(np.arange(_NUM_ROUNDS, dtype=np.uint64), np.array(_KEY_STEPS, np.uint64))
    round_keys = (first + steps.reshape(_NUM_ROUNDS, 2, *(1 for _ in first.shape[1:]))) & mask  # [rounds, 2, ...]
    for round_key in round_keys:
        np.multiply(factors, multipliers, out=products)
        np.right_shift(products, bits, out=factors)
        np.bitwise_xor(others, factors[::-1], out=others)
        np.bitwise_xor(others, round_key, out=others)
        np.bitwise_and(products, mask, out=products)
        factors, others, products = others, products[::-1], factors
    return np.stack([factors[0], others[0], factors[1], others[1]]).view(np.int64)

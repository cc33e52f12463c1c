"""How many tokens the KV pool holds: what memory is free, and what else will need some of it.

Knows bytes; refuses to know tensors and sequences.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.backends.base import BYTES_PER_LOGIT, COPIES
from specdec.core.limits import MAX_CHAIN_NODES, MAX_TREE_ROWS
from specdec.passes.prefill import ROWS_PER_PASS
from specdec.runner import cgroup
from specdec.sampling.noise_cache import MAX_KEPT_ROWS

BLOCK = 16  # tokens; a pool is never smaller

_TRANSFORMED_BYTES = 4
"""Per logit: a copy in float32, where penalties or the like change it."""
_NOISE_BYTES = 8
_VISIBLE_BYTES = 10
"""Per query and key: whether it is visible, and how far it is."""
_CAPPED_BYTES = 3 * 4
"""Per query, key and head, where scores are capped: those and what comes of them, in float32."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides how much memory its passes need."""

    hidden_size: int
    widest: int  # features of any layer but the last
    vocab_size: int
    num_layers: int
    context_length: int
    element_bytes: int
    num_heads: int
    num_kv_heads: int
    num_reaches: int = 1  # of attention: layers that see all, layers with a window
    caps_scores: bool = False
    logits_per_call: int = 0  # see specdec.backends.base.Backend


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """In bytes, but for ``num_slots``."""

    free: int
    weights: int
    activations: int
    bytes_per_slot: int
    num_slots: int

    def report(self) -> dict[str, str | int]:
        """For the log."""
        return {
            "free_beside_weights": size(self.free),
            "weights": size(self.weights),
            "largest_pass": size(self.activations),
            "kv_pool": size(self.num_slots * self.bytes_per_slot),
            "kv_tokens": self.num_slots,
        }


def plan(
    shape: Shape, weights: int, bytes_per_slot: int, free: int, kv_slots: int, fraction: float, max_sequences: int
) -> MemoryPlan:
    """``kv_slots``, or if that is 0 what fits into ``fraction`` of ``free``: at most what can ever be used.

    Raises ValueError with a sentence for the operator if there is no room.
    """
    # A call of attention gathers the keys and values that it attends to, one layer's.
    bytes_with_copies = bytes_per_slot + -(-COPIES * bytes_per_slot // max(1, shape.num_layers))
    activations = largest_pass(shape)
    if kv_slots:
        needed = activations + kv_slots * bytes_with_copies
        if needed > free:
            raise ValueError(
                f"--kv-slots {kv_slots} needs {size(needed)}, with what a pass computes, and {size(free)} are free; "
                f"{max(0, (free - activations) // bytes_with_copies)} would fit"
            )
        num_slots = kv_slots
    else:
        room = int(free * fraction) - activations
        num_slots = min(room // bytes_with_copies, max_sequences * shape.context_length)
        if num_slots < BLOCK:
            raise ValueError(
                f"no memory is left for the KV cache: beside the weights ({size(weights)}) {size(free)} are free, "
                f"--memory-fraction {fraction} of which may be used; a pass needs {size(activations)}, a token "
                f"{size(bytes_per_slot)}. Free some, raise --memory-fraction, or set --kv-slots"
            )
    return MemoryPlan(free, weights, activations, bytes_per_slot, num_slots)


def largest_pass(shape: Shape) -> int:
    """Bytes of activations, without the keys and values that are gathered, and of the noise that is kept."""
    rows = ROWS_PER_PASS + MAX_TREE_ROWS
    per_row = (6 * shape.hidden_size + 3 * shape.widest) * shape.element_bytes + 3 * shape.hidden_size * 4
    num_logits = MAX_TREE_ROWS * shape.vocab_size
    at_once = min(num_logits, max(shape.logits_per_call, (1 + MAX_CHAIN_NODES) * shape.vocab_size))
    logits = num_logits * (shape.element_bytes + _TRANSFORMED_BYTES) + at_once * BYTES_PER_LOGIT
    noise = MAX_KEPT_ROWS * shape.vocab_size * _NOISE_BYTES
    # What is added to the scores is kept for each query of a key's head and each reach, and made from another copy.
    num_added = 1 + shape.num_reaches * (shape.num_heads // shape.num_kv_heads)
    per_key = _VISIBLE_BYTES + num_added * shape.element_bytes
    if shape.caps_scores:
        per_key += shape.num_heads * _CAPPED_BYTES
    return rows * per_row + logits + noise + ROWS_PER_PASS * shape.context_length * per_key


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on the device, the limits of a container counted."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(min(_machine_memory(), cgroup.memory_left()))


def _machine_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that programs can have without swapping. Where nobody says, half of what is built in."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def size(num_bytes: float) -> str:
    """For people."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"

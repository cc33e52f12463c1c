"""The size of the KV pool, from the free memory and the other needs of a service."""

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

BLOCK = 16  # minimum tokens of a pool

_TRANSFORMED_BYTES = 4
"""Per logit: the float32 copy that penalties and other logits processors change."""
_NOISE_BYTES = 8
_VISIBLE_BYTES = 10
"""Per query and key: visibility and distance."""
_CAPPED_BYTES = 3 * 4
"""Per query, key and head with capped scores: the scores and their temporaries in float32."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a model that decide the memory of its passes."""

    hidden_size: int
    widest: int  # maximum of the features of a layer, without the head
    vocab_size: int
    num_layers: int
    context_length: int
    element_bytes: int
    num_heads: int
    num_kv_heads: int
    num_reaches: int = 1  # different kinds of attention layers: full, with a window
    caps_scores: bool = False
    logits_per_call: int = 0  # see specdec.backends.base.Backend


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of the memory, in bytes, and the slots of the KV pool."""

    free: int
    weights: int
    activations: int
    bytes_per_slot: int
    num_slots: int

    def report(self) -> dict[str, str | int]:
        """The plan as fields of a log record."""
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
    """The plan with ``kv_slots`` slots; if 0, as many as fit into ``fraction`` of ``free`` and all sequences can use.

    Raises ValueError with a message for the operator if the memory does not suffice.
    """
    # An attention call gathers copies of one layer's keys and values.
    bytes_with_copies = bytes_per_slot + -(-COPIES * bytes_per_slot // max(1, shape.num_layers))
    activations = largest_pass(shape)
    if kv_slots:
        needed = activations + kv_slots * bytes_with_copies
        if needed > free:
            raise ValueError(
                f"--kv-slots {kv_slots} needs {size(needed)}, activations included, but only {size(free)} are free; "
                f"{max(0, (free - activations) // bytes_with_copies)} would fit"
            )
        num_slots = kv_slots
    else:
        room = int(free * fraction) - activations
        num_slots = min(room // bytes_with_copies, max_sequences * shape.context_length)
        if num_slots < BLOCK:
            raise ValueError(
                f"no memory is left for the KV cache: {size(free)} are free after the weights ({size(weights)}), of "
                f"which --memory-fraction {fraction} may be used; a pass needs {size(activations)}, a token "
                f"{size(bytes_per_slot)}. Free some memory, raise --memory-fraction, or set --kv-slots"
            )
    return MemoryPlan(free, weights, activations, bytes_per_slot=bytes_per_slot, num_slots=num_slots)


def largest_pass(shape: Shape) -> int:
    """Bytes of the largest pass's activations, without the gathered keys and values, and of the cached noise."""
    rows = ROWS_PER_PASS + MAX_TREE_ROWS
    per_row = (6 * shape.hidden_size + 3 * shape.widest) * shape.element_bytes + 3 * shape.hidden_size * 4
    num_logits = MAX_TREE_ROWS * shape.vocab_size
    at_once = min(num_logits, max(shape.logits_per_call, (1 + MAX_CHAIN_NODES) * shape.vocab_size))
    logits = num_logits * (shape.element_bytes + _TRANSFORMED_BYTES) + at_once * BYTES_PER_LOGIT
    noise = MAX_KEPT_ROWS * shape.vocab_size * _NOISE_BYTES
    # Attention masks are kept for each query of a key head and each kind of attention, and computed from another copy.
    num_added = 1 + shape.num_reaches * (shape.num_heads // shape.num_kv_heads)
    per_key = _VISIBLE_BYTES + num_added * shape.element_bytes
    if shape.caps_scores:
        per_key += shape.num_heads * _CAPPED_BYTES
    return rows * per_row + logits + noise + ROWS_PER_PASS * shape.context_length * per_key


def free_memory(device: torch.device) -> int:
    """Free bytes on the device, within the limits of a container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(min(_machine_memory(), cgroup.memory_left()))


def _machine_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes available to programs without swapping; without this figure half of the physical memory."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def size(num_bytes: float) -> str:
    """``num_bytes`` as readable text."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"

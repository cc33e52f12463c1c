"""Numbers for a device, sent without waiting for it.

A plain ``torch.tensor(values, device=...)`` waits until a GPU has computed all that was queued before. Imports torch at
call time only: the orchestrator imports core without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def indices(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:  # same shape, int64
    """``values`` on ``device``."""
    import torch

    return sent(torch.tensor(values, dtype=torch.int64), device)


def numbers(values: Sequence[float], device: torch.device) -> Tensor:  # [n] float64
    """``values`` on ``device``."""
    import torch

    return sent(torch.tensor(values, dtype=torch.float64), device)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """``values``, which are in the CPU's memory and do not change any more, on ``device``."""
    if device.type == "cuda":
        values = values.pin_memory()  # a copy from pageable memory may wait
    return values.to(device, non_blocking=True)

"""The memory of a pass: the sections of its description on the host and on the device, and one copy between them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from specdec.backends.cuda.plan import Inputs, Plan, Shape

_DTYPES: dict[type, torch.dtype] = {np.int32: torch.int32, np.int64: torch.int64, np.float64: torch.float64}


class PassMemory:
    """Memory for the descriptions of one shape, one at a time. It never moves. On a CPU both sides are the same."""

    def __init__(self, shape: Shape, device: torch.device, block_size: int) -> None:
        self.shape, self.device, self.block_size = shape, device, block_size
        sizes = [math.prod(size) * np.dtype(kind).itemsize // 4 for _, kind, size in shape.sections]
        pinned = device.type == "cuda"
        self._here = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        self.there = self._here if device.type == "cpu" else self._here.to(device)
        self.here: dict[str, np.ndarray] = {}
        """The sections on the host. On a GPU they do not follow what kernels change."""
        self._sections: dict[str, Tensor] = {}
        start = 0
        for (name, kind, size), length in zip(shape.sections, sizes, strict=True):
            part = slice(start, start + length)
            self.here[name] = self._here[part].numpy().view(kind).reshape(size)
            self._sections[name] = self.there[part].view(_DTYPES[kind]).view(size)
            start += length
        self._blocks_from = start - shape.blocks

    def __getitem__(self, name: str) -> Tensor:
        """A section on the device."""
        return self._sections[name]

    def load(self, plan: Plan, inputs: Inputs | None = None) -> None:
        """Replace the description. The device must have done with the one before."""
        plan.write(self.here, inputs)
        if self.there is not self._here:
            used = self._blocks_from + len(plan.blocks)
            self.there[:used].copy_(self._here[:used], non_blocking=True)

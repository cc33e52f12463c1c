"""The choice of a backend for this machine. The only module that knows all backends."""

from __future__ import annotations

import torch

from specdec.backends.avx512.backend import Avx512Backend
from specdec.backends.base import Backend
from specdec.backends.cuda.backend import CudaBackend
from specdec.backends.torch.backend import TorchBackend
from specdec.backends.torch.onednn_linear import has_native_bfloat16


def default_dtype(device: torch.device) -> str:
    """The default dtype of weights and cache on this device; "auto": the checkpoint's dtype."""
    if device.type != "cpu":
        return "auto"
    return "bfloat16" if has_native_bfloat16() else "float32"


def choose(name: str, device: torch.device) -> Backend:
    """The backend called ``name``: torch, avx512, cuda, or auto, the fastest measured one that this machine can run.

    Raises ValueError, with a message for the operator, if the machine cannot run it.
    """
    by_torch = TorchBackend(device)
    if name == "torch":
        return by_torch
    if name == "cuda":
        if (why_not := CudaBackend.why_not(device)) is not None:
            raise ValueError(f"--backend cuda cannot be used: {why_not}")
        return CudaBackend(by_torch)
    if (why_not := Avx512Backend.why_not(device)) is None:
        return Avx512Backend(by_torch)
    if name == "avx512":
        raise ValueError(f"--backend avx512 cannot be used: {why_not}")
    return by_torch

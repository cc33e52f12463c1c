"""The backends as tests take them: all of them where this machine can, or the one that would be chosen here."""

from __future__ import annotations

import os

import pytest
import torch

from specdec.backends.avx512.backend import Avx512Backend
from specdec.backends.base import Backend
from specdec.backends.choice import choose

CPU = torch.device("cpu")
WHY_NOT_AVX512 = Avx512Backend.why_not(CPU)
AVX512_ONLY = pytest.mark.skipif(WHY_NOT_AVX512 is not None, reason=str(WHY_NOT_AVX512))
BACKENDS = ["torch", "cuda", pytest.param("avx512", marks=AVX512_ONLY)]


def backend(name: str | None = None) -> Backend:
    """A new one, as each model has."""
    return choose(name or os.environ.get("SPECDEC_BACKEND", "auto"), CPU)

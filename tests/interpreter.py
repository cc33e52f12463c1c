"""Triton's kernels run in its interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch


def needs_triton() -> None:
    """Leave the module out without triton. To be called before it is imported: it reads the environment when it defines
    a function."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="the extra gpu is not installed")

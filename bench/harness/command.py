"""Runs a benchmark from a shell. Knows signals; does not know the measurements."""

from __future__ import annotations

import signal
from collections.abc import Callable
from enum import StrEnum

import typer


class Dtype(StrEnum):
    """The data type of weights."""

    bfloat16 = "bfloat16"
    float32 = "float32"


def run_benchmark(main: Callable[..., None]) -> None:
    """Run ``main`` with its command-line flags. SIGTERM acts like Ctrl-C, so the services of the benchmark also end."""
    # By Ctrl-C's own signal, which asyncio handles: an exception out of any place could be lost in a callback.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    typer.run(main)

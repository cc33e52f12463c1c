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
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    typer.run(main)

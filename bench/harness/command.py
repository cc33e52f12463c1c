"""How a benchmark is run from a shell. Knows signals; refuses to know what is measured."""

from __future__ import annotations

import signal
from collections.abc import Callable
from enum import StrEnum

import typer


class Dtype(StrEnum):
    """Of weights."""

    bfloat16 = "bfloat16"
    float32 = "float32"


def run_benchmark(main: Callable[..., None]) -> None:
    """``main`` with its flags. SIGTERM ends it like Ctrl-C: the services that it started end, too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    typer.run(main)

"""How a benchmark is run from a shell. Knows signals; refuses to know what is measured."""

from __future__ import annotations

import signal
from collections.abc import Callable

import typer


def run_benchmark(main: Callable[..., None]) -> None:
    """``main`` with its flags. SIGTERM ends it like Ctrl-C: the services that it started end, too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    typer.run(main)

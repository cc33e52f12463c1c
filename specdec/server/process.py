"""Settings of Python and OpenMP for a process that serves. Knows the process; does not know what it serves."""

from __future__ import annotations

import gc
import os

_SPINS = 10_000
"""Iterations of an idle thread's loop, 0.1 to 0.2 ms. A third of them is too few: threads then sleep within passes."""


def freeze_garbage() -> None:
    """Exclude all present objects from garbage collection. Call it after modules, models, servers etc. are made.

    A full collection stops the process: about 40 ms in an orchestrator that has just started, every half minute under
    load. It does not visit frozen objects.
    """
    gc.collect()
    gc.freeze()


def let_threads_sleep() -> None:
    """Let OpenMP threads sleep soon after a pass, unless OMP_WAIT_POLICY or GOMP_SPINCOUNT is set. Call it before torch
    is loaded, because OpenMP reads the setting once.

    By default torch's OpenMP (GNU) spins for several milliseconds, on cores that another model or the message path
    needs between two passes. Within a pass the next work arrives after at most a few dozen microseconds.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))

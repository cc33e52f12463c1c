"""What a process that serves asks of Python and of OpenMP. Knows the process; refuses to know what it serves."""

from __future__ import annotations

import gc
import os

_SPINS = 10_000
"""Turns of an idle loop, 0.1 to 0.2 ms. A third of it makes passes slower, as threads must be woken within them."""


def freeze_garbage() -> None:
    """Call once everything that lives as long as the process is made: modules, models, servers, connections.

    A full collection looks at every object while everything stands still: some 40 ms in an orchestrator that has just
    started, every half minute under load. What was there at this call it never looks at again.
    """
    gc.collect()
    gc.freeze()


def let_threads_sleep() -> None:
    """Have the threads of a pass sleep soon after it, unless the environment says otherwise. Call it before torch is
    loaded, which reads this once.

    GNU's OpenMP, which torch brings along, spins for several milliseconds, on cores that another model or the message
    path needs between two passes. Within a pass there is always more within a few dozen microseconds.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))

"""Python's garbage collector in a process that serves: it need not look again and again at what is there to stay.

Knows the collector alone.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Call once everything that lives as long as the process is made: modules, models, servers, connections.

    A full collection looks at every object and everything stands still meanwhile: some 40 ms in an orchestrator that
    has just started, every half minute under load. What was there at this call it never looks at again.
    """
    gc.collect()
    gc.freeze()

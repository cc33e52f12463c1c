"""How long the threads that compute a pass look out for more, before they sleep.

GNU's OpenMP, which torch brings along, has them do so for several milliseconds, on cores that somebody else needs
between two passes: another model, or whoever carries a verdict. Within a pass there is always more within a few dozen
microseconds. Figures are in bench/LOG.md.
"""

from __future__ import annotations

import os

_TURNS = 10_000
"""Of an idle loop: 0.1 to 0.2 ms. A third of it makes passes slower, as threads must be woken within them."""


def sleep_soon() -> None:
    """Of this process, unless its environment says otherwise. Read when torch is loaded: to be called before that."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_TURNS))

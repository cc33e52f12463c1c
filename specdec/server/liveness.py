"""Whether a model service still makes progress, told by its health: not ready first, then not alive.

Knows for how long the pass at hand has run and how many failed in a row; refuses to know why. An idle service
makes no pass and is well. That the event loop runs needs no watch: without it no health check is answered.
"""

from __future__ import annotations

import asyncio
import logging
import time

from specdec.server.step_loop import StepLoop
from specdec.transport.rpc import Server

RESTART_STATUS = 3
"""Exit status of a service that gave itself up, to be started again."""

log = logging.getLogger(__name__)

_FAILED_PASSES = 8
"""So many failed passes in a row are the device's fault: a request that fails its passes is given up after four."""
_LOOKS = 20
"""Per ``hung_pass_s``."""


async def watch(loop: StepLoop, server: Server, hung_pass_s: float) -> str:
    """Returns why the service must end and be started again, once there is no hope; health says NOT_SERVING then.

    A pass of more than ``hung_pass_s`` makes it NOT_SERVING, so that nobody brings new work; one that ends after
    all makes it SERVING again. A pass of twice that, a dead thread or a device that fails every pass is hopeless.
    """
    every_s = min(1.0, hung_pass_s / _LOOKS)
    age_s, began, looked = 0.0, loop.busy_since, time.monotonic()
    hung = False
    while (reason := _hopeless(loop, age_s, 2 * hung_pass_s)) is None:
        if hung != (age_s >= hung_pass_s):
            hung = not hung
            log.warning("a pass hangs" if hung else "the pass that hung has ended", extra={"pass_age_s": age_s})
            server.set_serving(not hung)
        await asyncio.sleep(every_s)
        # Not by the clock alone: a process that was stopped for a while comes back late, and has not hung.
        now = time.monotonic()
        same = began is not None and began == loop.busy_since
        age_s = age_s + min(now - looked, 2 * every_s) if same else 0.0
        began, looked = loop.busy_since, now
    server.set_serving(False)
    server.set_alive(False)
    return reason


def _hopeless(loop: StepLoop, age_s: float, limit_s: float) -> str | None:
    if loop.died:
        return "the model's thread has died"
    if loop.failed_in_a_row >= _FAILED_PASSES:
        return f"{loop.failed_in_a_row} passes failed in a row"
    return f"a pass has run for {age_s:.0f} s" if age_s >= limit_s else None

"""The watchdog of a model service. Health reports a service without progress first as not ready, then as not alive.

Knows the age of the current pass and the number of passes that failed in a row; does not know the causes. An idle
service is healthy. The event loop needs no watchdog: if it hangs, no health check is answered.
"""

from __future__ import annotations

import asyncio
import logging
import time

from specdec.server.step_loop import StepLoop
from specdec.transport.rpc import Server

RESTART_STATUS = 3
"""Exit status of a service that ends because it makes no progress and must be restarted."""

log = logging.getLogger(__name__)

_FAILED_PASSES = 8
"""Passes in a row in which nothing was computed that prove a fault of the device: a request that makes passes fail is
given up after four."""
_CHECKS_PER_HUNG_PASS = 20


async def watch(loop: StepLoop, server: Server, hung_pass_s: float) -> str:
    """Watch the step loop. Returns the reason when the service must be restarted; health is NOT_SERVING from then on.

    A pass longer than ``hung_pass_s`` makes the service NOT_SERVING, so that it gets no new work, until the pass ends.
    A restart is needed after a pass of twice that time, after the thread has died, or when every pass fails.
    """
    every_s = min(1.0, hung_pass_s / _CHECKS_PER_HUNG_PASS)
    age_s, began, looked = 0.0, loop.busy_since, time.monotonic()
    hung = False
    while (reason := _restart_reason(loop, age_s, 2 * hung_pass_s)) is None:
        if hung != (age_s >= hung_pass_s):
            hung = not hung
            log.warning("a pass hangs" if hung else "the pass that hung has ended", extra={"pass_age_s": age_s})
            server.set_serving(not hung)
        await asyncio.sleep(every_s)
        # The increments are limited because the whole process may be suspended for a while, which is no hung pass.
        now = time.monotonic()
        same = began is not None and began == loop.busy_since
        age_s = age_s + min(now - looked, 2 * every_s) if same else 0.0
        began, looked = loop.busy_since, now
    server.set_serving(False)
    server.set_alive(False)
    return reason


def _restart_reason(loop: StepLoop, age_s: float, limit_s: float) -> str | None:
    if loop.died:
        return "the model's thread has died"
    if loop.failed_in_a_row >= _FAILED_PASSES:
        return f"{loop.failed_in_a_row} passes failed in a row"
    return f"a pass has run for {age_s:.0f} s" if age_s >= limit_s else None

"""Whether the orchestrator is ready for requests: as long as there are targets. Knows a pool; does not know probes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from orchestrator.replicas.pool import Pool

log = logging.getLogger(__name__)


async def follow(targets: Pool, tell: Callable[[bool], None], grace_s: float) -> None:
    """Tell whether requests can be served, until cancelled: from the first ready target on, until for ``grace_s`` none
    was ready. Within the grace, which is a request's wait for a target, the only target may be replaced."""
    while True:
        try:
            async with asyncio.timeout(grace_s):
                await targets.until(ready=True)
        except TimeoutError:
            log.warning("not ready: there is no target", extra={"for_s": grace_s, "problems": targets.problems()})
            tell(False)
            await targets.until(ready=True)
        tell(True)
        await targets.until(ready=False)

"""All services on this machine, in the foreground: starts them, restarts them on request, and stops them.

Knows the output for the user; does not know how processes are started (specdec.cli.processes).
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from specdec.cli.processes import StartError, deployment, listening, service, watch
from specdec.server.liveness import RESTART_STATUS

_PAUSE_S = 1.0
"""Pause before a restart, so that a service that always needs one does not occupy the machine."""


async def run(
    console: Console,
    target: str,
    draft: str | None,
    port: int,
    arguments: Sequence[str],
    certificates: Path | None = None,
    logs: Path | None = None,
    revisions: Mapping[str, str] = MappingProxyType({}),
    http_port: int = 0,
    head: str | None = None,
) -> None:
    """Run until cancelled, with a gateway at ``http_port`` (0: none).

    Raises StartError if a service does not start or ends, after stopping the others. Logs are kept in the directory
    ``logs``. Without it they are in a temporary directory, kept only after an error.
    """
    directory = logs or Path(tempfile.mkdtemp(prefix="specdec-"))
    wrong = False
    try:
        await _run(console, target, draft, port, arguments, certificates, directory, revisions, http_port, head)
    except asyncio.CancelledError:
        raise
    except BaseException:
        wrong = True
        raise
    finally:
        if logs is None and not wrong:
            shutil.rmtree(directory, ignore_errors=True)


async def _run(
    console: Console,
    target: str,
    draft: str | None,
    port: int,
    arguments: Sequence[str],
    certificates: Path | None,
    logs: Path,
    revisions: Mapping[str, str],
    http_port: int,
    head: str | None,
) -> None:
    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    async with AsyncExitStack() as stack:
        with console.status("Starting ..."):
            services = list(
                await stack.enter_async_context(
                    deployment(target, draft, port, arguments, certificates, logs, say, revisions, head)
                )
            )
            orchestrator = services[-1]
            if http_port:
                own = [f"--orchestrator={orchestrator.address}"]
                services.append(await stack.enter_async_context(service("gateway", http_port, own, logs)))
                await listening(services[-1])
        for each in services:
            say(f"  {each.name:<15} {each.address}  {each.log.name}")
        ca = f" --tls-ca {certificates / 'operator' / 'ca.crt'}" if certificates else ""
        say(f'Ready: specdec generate "def main(" --address {orchestrator.address}{ca}')
        if http_port:
            say(f"OpenAI's API: http://{services[-1].address}/v1")
        stack.callback(console.print, "Stopping ...")
        async with aclosing(watch(services)) as endings:
            async for ended, ending in endings:
                if ended.process.returncode != RESTART_STATUS:
                    raise StartError(f"{ending}:\n{ended.log_tail()}")
                say(f"{ending}. It gave itself up and is restarted.")
                await asyncio.sleep(_PAUSE_S)
                await ended.restart()

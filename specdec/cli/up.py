"""All services on this machine, in the foreground: starts them, restarts them on request, and stops them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
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
    *,
    head: str | None = None,
    revisions: Mapping[str, str] = MappingProxyType({}),
    arguments: Sequence[str] = (),
    port: int = 0,
    http_port: int = 0,
    certificates: Path | None = None,
    logs: Path | None = None,
) -> None:
    """Run until cancelled, with a gateway at ``http_port`` (0: none). The rest: see specdec.cli.processes.deployment.

    Raises StartError if a service does not start or ends, after stopping the others. Logs are kept in the directory
    ``logs``. Without it they are in a temporary directory, kept only after an error.
    """

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    async with AsyncExitStack() as stack:
        directory = stack.enter_context(_log_directory(logs))
        with console.status("Starting ..."):
            started = deployment(
                target,
                draft,
                head=head,
                revisions=revisions,
                arguments=arguments,
                port=port,
                certificates=certificates,
                logs=directory,
                tell=say,
            )
            services = list(await stack.enter_async_context(started))
            orchestrator = services[-1]
            if http_port:
                flags = [f"--orchestrator={orchestrator.address}"]
                services.append(await stack.enter_async_context(service("gateway", http_port, flags, logs=directory)))
                await listening(services[-1])
        for running in services:
            say(f"  {running.name:<15} {running.address}  {running.log.name}")
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


@contextmanager
def _log_directory(logs: Path | None) -> Iterator[Path]:
    directory = logs or Path(tempfile.mkdtemp(prefix="specdec-"))
    failed = False
    try:
        yield directory
    except asyncio.CancelledError:
        raise
    except BaseException:
        failed = True
        raise
    finally:
        if logs is None and not failed:
            shutil.rmtree(directory, ignore_errors=True)

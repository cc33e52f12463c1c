"""The three services as processes of this machine: start, wait until healthy, watch, stop. Imports none of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import Client
from specdec.security import dev_ca as made
from specdec.security.tls import Tls
from specdec.transport import rpc

T = TypeVar("T")

_STOP_TIMEOUT_S = 15.0

_GRPC_EXPERIMENTS = {"1.85": "-event_engine_client,-event_engine_listener"}
"""By the release of gRPC, whose names of experiments are no promises. Its event engine has threads of its own, which
wait for sockets and hand on what comes; without it, as until 2026, whoever waits for a message waits for the socket.
On two cores that also compute, a round takes 0.3 to 0.6 ms less (bench/LOG.md)."""


class StartError(Exception):
    """A service did not come up, or did not stay; the message has the end of its log."""


@dataclass(slots=True)
class Service:
    """One service, and the process that it runs in now."""

    name: str
    address: str
    command: list[str]
    log: IO[bytes]
    log_stays: bool  # also when this is over
    process: asyncio.subprocess.Process
    tls: Tls | None = None  # with which it is asked
    tls_name: str = ""

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def restart(self) -> None:
        """After its process ended: another one, with the same arguments, port and log."""
        self.process = await _started(self.command, self.log)

    def ending(self) -> str:
        """How it ended, in words, and where its log is if that stays."""
        status = self.process.returncode
        assert status is not None, "it has not ended"
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        return f"{self.name} ended {how}" + (f"; its log is {self.log.name}" if self.log_stays else "")

    def log_tail(self, num_lines: int = 12) -> str:
        lines = Path(self.log.name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def python_command(module: str, *arguments: str) -> list[str]:
    """What runs a module, and not something of its name that lies in the working directory; see ``environment``."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Ours, and how gRPC waits if it does not say. In a checkout it says where that is, so that its modules are found
    from every directory."""
    ours = dict(os.environ)
    if experiments := _GRPC_EXPERIMENTS.get(grpc.__version__.rpartition(".")[0]):
        ours.setdefault("GRPC_EXPERIMENTS", experiments)
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "bench").is_dir():
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    return ours


async def _started(command: Sequence[str], log: IO[bytes]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdout=log,
        stderr=log,
        env=environment(),
        # Ctrl-C goes to the terminal's whole group; who stops whom, and in what order, is decided here.
        start_new_session=True,
    )


@contextlib.asynccontextmanager
async def service(module: str, port: int, arguments: Sequence[str], logs: Path | None = None) -> AsyncIterator[Service]:
    """``python -m module`` on loopback; ``module`` may bring an argument. Stopped by SIGTERM at the end.

    Its log is ``logs``/MODULE.log and stays, or without that directory a file that goes with it.
    """
    name, *first = module.split()
    with _log(name, logs) as log:
        command = python_command(name, *first, f"--port={port}", *arguments)
        process = await _started(command, log)
        one = Service(module, f"127.0.0.1:{port}", command, log, logs is not None, process)
        try:
            yield one
        finally:
            await _stop(one.process)


def _log(name: str, logs: Path | None) -> IO[bytes]:
    if logs is not None:
        return open(logs / f"{name}.log", "ab")
    return tempfile.NamedTemporaryFile(prefix=f"specdec-{name}-", suffix=".log")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def deployment(
    target: str,
    draft: str,
    port: int = 0,
    arguments: Sequence[str] = (),
    certificates: Path | None = None,
    logs: Path | None = None,
) -> AsyncIterator[tuple[Service, Service, Service]]:
    """Target, draft and orchestrator, ready to generate. ``arguments`` are for both model services.

    With the directory of ``certificates`` (specdec.security.dev_ca) they speak TLS; in the directory ``logs`` their
    logs stay. Raises StartError.
    """
    roles = ("target", "draft", "orchestrator")
    target_port, draft_port, free_port = free_ports(3)
    tls = _operator(certificates) if certificates else None

    def tls_flags(role: str) -> list[str]:
        files = (("cert", made.CERT), ("key", made.KEY), ("ca", made.CA)) if certificates else ()
        return [f"--tls-{what}={certificates}/{role}/{file}" for what, file in files]

    async with contextlib.AsyncExitStack() as stack:

        async def start(module: str, role: str, port: int, *flags: str) -> Service:
            return await stack.enter_async_context(service(module, port, [*flags, *tls_flags(role)], logs))

        target_service = await start("target_service", "target", target_port, f"--model={target}", *arguments)
        draft_service = await start("draft_service", "draft", draft_port, f"--model={draft}", *arguments)
        addresses = (f"--target={target_service.address}", f"--draft={draft_service.address}")
        orchestrator = await start(
            "orchestrator", "orchestrator", port or free_port, *addresses, f"--tokenizer={target}"
        )
        services = (target_service, draft_service, orchestrator)
        for each, role in zip(services, roles, strict=True):
            if tls:
                each.tls, each.tls_name = tls, role
        try:
            async with asyncio.TaskGroup() as group:  # whichever ends first is heard of at once
                for each in services:
                    group.create_task(healthy(each))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await paired(orchestrator)
        yield services


def _operator(certificates: Path) -> Tls:
    own = certificates / "operator"
    try:
        return Tls(str(own / made.CA), str(own / made.CERT), str(own / made.KEY))
    except ValueError as error:
        raise StartError(f"no certificates as `specdec certificates` makes them: {error}") from error


async def watch(services: Sequence[Service]) -> AsyncGenerator[tuple[Service, str], None]:
    """Each service that ends, and how in words; it may be started again before the next is asked for."""
    waits = {asyncio.create_task(each.process.wait()): each for each in services}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                service = waits.pop(wait)
                yield service, service.ending()
                if service.process.returncode is None:
                    waits[asyncio.create_task(service.process.wait())] = service
    finally:
        for wait in waits:
            wait.cancel()


async def healthy(service: Service, timeout_s: float = 600.0) -> None:
    """Returns once the service says SERVING. Raises StartError if it ends or does not in time."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if service.process.returncode is not None:
            raise StartError(f"{service.ending()}:\n{service.log_tail()}")
        if await is_serving(service.address, tls=service.tls, tls_name=service.tls_name):
            return
        await asyncio.sleep(0.1)
    raise StartError(f"{service.name} was not healthy after {timeout_s:g} s:\n{service.log_tail()}")


async def is_serving(
    address: str, timeout_s: float = 1.0, service: str = "", tls: Tls | None = None, tls_name: str = ""
) -> bool:
    """What the standard gRPC health service at ``address`` says of ``service``; False if there is none."""
    async with rpc.channel(address, tls, tls_name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response: Any = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def paired(orchestrator: Service, timeout_s: float = 30.0) -> None:
    """Returns once the orchestrator uses all its replicas. Raises StartError, saying which it does not, and why."""
    problem = ""
    async with Client(orchestrator.address, tls=orchestrator.tls) as client:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            replicas = (await client.server_info()).replicas
            problem = "\n".join(f"{r.role} {r.address}: {r.problem}" for r in replicas if not r.ready)
            if not problem:
                return
            await asyncio.sleep(0.1)
    raise StartError(f"the orchestrator does not use all replicas:\n{problem}")


async def until_signalled(work: Coroutine[Any, Any, T]) -> T | None:
    """What it returns; None if SIGTERM, SIGINT or SIGHUP came first. Then it was cancelled, and has cleaned up."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    told = False

    def stop() -> None:
        nonlocal told
        if not told:  # twice would cut the cleaning up short, and leave processes behind
            told = True
            task.cancel()

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if not told:
            raise
        return None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()

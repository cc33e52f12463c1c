"""Runs the three services as local processes: start, wait until healthy, watch, stop. Imports none of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import Client
from specdec.security import dev_ca
from specdec.security.tls import Tls
from specdec.transport import rpc
from specdec.transport.rpc import LIVENESS

T = TypeVar("T")
Tell = Callable[[str], None]

_STOP_TIMEOUT_S = 15.0
_FIRST_WORD_S = 3.0

_GRPC_EXPERIMENTS = {"1.85": "-event_engine_client,-event_engine_listener"}
"""Values of GRPC_EXPERIMENTS by gRPC release, because the names of experiments are not stable. They disable the event
engine, which reads sockets in its own threads and passes messages on. Without it the waiting thread reads the socket,
which saves 0.3 to 0.6 ms per round on two cores that also compute (bench/LOG.md, 2026-11-26)."""


def _silent(_: str) -> None:
    pass


class StartError(Exception):
    """A service did not start, or ended. The message has the end of its log."""


@dataclass(slots=True)
class Service:
    """A service and its current process."""

    name: str
    address: str
    command: list[str]
    log: IO[bytes]
    log_stays: bool  # whether the log file is kept after the end
    process: asyncio.subprocess.Process
    tls: Tls | None = None  # certificates of its callers here
    tls_name: str = ""

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def restart(self) -> None:
        """Start a new process after the old one has ended, with the same arguments, port and log."""
        self.process = await _started(self.command, self.log)

    def ending(self) -> str:
        """A description of how it ended, with the path of its log if that is kept."""
        status = self.process.returncode
        assert status is not None, "it has not ended"
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        return f"{self.name} ended {how}" + (f"; its log is {self.log.name}" if self.log_stays else "")

    def log_tail(self, num_lines: int = 12) -> str:
        """From what it refused on, or its last lines. Libraries may write more when it ends."""
        lines = Path(self.log.name).read_text(errors="replace").splitlines()
        first = max((index for index, line in enumerate(lines) if line.startswith("specdec ")), default=-num_lines)
        return "\n".join(lines[first:][:num_lines])


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module, but not one of the same name in the working directory (see ``environment``)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """The environment for a service: ours, with GRPC_EXPERIMENTS unless that is set. PYTHONPATH has the checkout, if
    there is one, so that its modules are found from any directory."""
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
        # Ctrl-C signals the terminal's whole process group, but this process stops the services in order.
        start_new_session=True,
    )


@contextlib.asynccontextmanager
async def service(module: str, port: int, arguments: Sequence[str], logs: Path | None = None) -> AsyncIterator[Service]:
    """Run ``python -m module`` on loopback; stop it with SIGTERM at the end. ``module`` may include one argument.

    Its log is ``logs``/MODULE.log, which is kept, or without ``logs`` a temporary file. Raises StartError if there can
    be no such file.
    """
    name, *first = module.split()
    with _log(name, logs) as log:
        command = [*python_command(name, *first), f"--port={port}", *arguments]
        running = Service(
            name=module,
            address=f"127.0.0.1:{port}",
            command=command,
            log=log,
            log_stays=logs is not None,
            process=await _started(command, log),
        )
        try:
            yield running
        finally:
            await _stop(running.process)


def _log(name: str, logs: Path | None) -> IO[bytes]:
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
            return open(logs / f"{name}.log", "ab")
        except OSError as error:
            raise StartError(f"no log can be written in {logs}: {error.strerror}") from error
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
    draft: str | None,
    port: int = 0,
    arguments: Sequence[str] = (),
    certificates: Path | None = None,
    logs: Path | None = None,
    tell: Tell = _silent,
    revisions: Mapping[str, str] = MappingProxyType({}),
    head: str | None = None,
) -> AsyncIterator[Sequence[Service]]:
    """Run target, draft (unless that is None) and orchestrator, and yield them in this order once they can generate.

    ``arguments`` are for model services. They use TLS if ``certificates`` is set, a directory of
    specdec.security.dev_ca. Their logs are kept if the directory ``logs`` is set. ``tell`` gets a line about each wait
    that is long. ``revisions`` are those of hub ids, by role. ``head``: of the target. A ``draft`` that is a
    file is an n-gram model. Raises StartError.
    """
    models = {"target": target} | ({"draft": draft} if draft is not None else {})
    ports = dict(zip((*models, "orchestrator"), free_ports(len(models) + 1), strict=True))
    ports["orchestrator"] = port or ports["orchestrator"]
    # Addresses and revisions are named, so that none comes from the environment.
    addresses = {role: f"127.0.0.1:{ports[role]}" if role in models else "" for role in ("target", "draft")}
    revision = {role: f"--revision={revisions.get(role, '')}" for role in models}
    flags = {role: [_model(role, model), revision[role], *arguments] for role, model in models.items()}
    flags["target"] += [f"--head={head}"] if head is not None else []
    flags["orchestrator"] = [
        f"--tokenizer={target}",
        revision["target"],
        *(f"--{role}={address}" for role, address in addresses.items()),
    ]
    tls = _operator(certificates) if certificates else None
    async with contextlib.AsyncExitStack() as stack:
        services = []
        for role in flags:
            module = role if role == "orchestrator" else f"{role}_service"
            flags[role] += _tls_flags(certificates / role) if certificates else []
            services.append(await stack.enter_async_context(service(module, ports[role], flags[role], logs=logs)))
            services[-1].tls, services[-1].tls_name = tls, role
        await _can_generate(services, tell)
        yield services


async def _can_generate(services: Sequence[Service], tell: Tell) -> None:
    try:
        async with asyncio.TaskGroup() as group:  # fails at once if any service ends
            for started in services:
                group.create_task(healthy(started, tell=tell))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    await paired(services[-1], tell=tell)


def _model(role: str, model: str) -> str:
    """A checkpoint is a directory or a hub id."""
    return f"--ngram={model}" if role == "draft" and Path(model).is_file() else f"--model={model}"


def _tls_flags(directory: Path) -> list[str]:
    return [
        f"--tls-{what}={directory / file}"
        for what, file in (("cert", dev_ca.CERT), ("key", dev_ca.KEY), ("ca", dev_ca.CA))
    ]


def _operator(certificates: Path) -> Tls:
    directory = certificates / "operator"
    try:
        return Tls(*(str(directory / file) for file in (dev_ca.CA, dev_ca.CERT, dev_ca.KEY)))
    except ValueError as error:
        raise StartError(f"no certificates as `specdec certificates` makes them: {error}") from error


async def watch(services: Sequence[Service]) -> AsyncGenerator[tuple[Service, str], None]:
    """Yield each service that ends, with a description. The consumer may restart it before it asks for the next."""
    waits = {asyncio.create_task(running.process.wait()): running for running in services}
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


class _Patience:
    """Tells of a wait after 3 s, and again after 6, 12, 24 ... s."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._since = time.monotonic()
        self._next_s = _FIRST_WORD_S

    def wait(self, what: str) -> None:
        if time.monotonic() - self._since >= self._next_s:
            self._next_s *= 2
            self._tell(f"Waiting: {what}")


async def healthy(service: Service, timeout_s: float = 600.0, tell: Tell = _silent) -> None:
    """Wait until the service is alive: its model is loaded. Raises StartError if it ends, or after ``timeout_s``."""
    until, patience = time.monotonic() + timeout_s, _Patience(tell)
    while time.monotonic() < until:
        if service.process.returncode is not None:
            raise StartError(f"{service.ending()}:\n{service.log_tail()}")
        if await is_serving(service.address, service=LIVENESS, tls=service.tls, tls_name=service.tls_name):
            return
        patience.wait(f"{service.name} does not serve yet at {service.address}; its log is {service.log.name}")
        await asyncio.sleep(0.1)
    raise StartError(f"{service.name} was not healthy after {timeout_s:g} s:\n{service.log_tail()}")


async def listening(service: Service, timeout_s: float = 30.0) -> None:
    """Wait until something listens at the address of a service without gRPC. Raises StartError as ``healthy`` does."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if service.process.returncode is not None:
            raise StartError(f"{service.ending()}:\n{service.log_tail()}")
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(*service.address.split(":"))
            writer.close()
            return
        await asyncio.sleep(0.1)
    raise StartError(f"{service.name} did not listen after {timeout_s:g} s:\n{service.log_tail()}")


async def is_serving(
    address: str, timeout_s: float = 1.0, service: str = "", tls: Tls | None = None, tls_name: str = ""
) -> bool:
    """Whether the gRPC health service at ``address`` reports SERVING for ``service``; False if it does not answer."""
    async with rpc.channel(address, tls, tls_name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response: Any = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def paired(orchestrator: Service, timeout_s: float = 30.0, tell: Tell = _silent) -> None:
    """Wait until the orchestrator uses all its replicas. Raises StartError with the unused ones and the reasons."""
    problem = ""
    async with Client(orchestrator.address, tls=orchestrator.tls) as client:
        until, patience = time.monotonic() + timeout_s, _Patience(tell)
        while time.monotonic() < until:
            replicas = (await client.server_info()).replicas
            problem = "\n".join(f"{r.role} {r.address}: {r.problem}" for r in replicas if not r.ready)
            if not problem:
                return
            patience.wait(f"the orchestrator does not use {problem}; its log is {orchestrator.log.name}")
            await asyncio.sleep(0.1)
    raise StartError(f"the orchestrator does not use all replicas:\n{problem}")


async def until_signalled(work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work`` and return its result. After SIGTERM, SIGINT or SIGHUP it is cancelled, and the result is None."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    signalled = False

    def stop() -> None:
        nonlocal signalled
        if not signalled:  # a second cancellation would interrupt the clean-up and leave processes behind
            signalled = True
            task.cancel()

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if not signalled:
            raise
        return None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def free_ports(count: int) -> list[int]:
    """Free ports of loopback. Another process may take them before they are used."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()

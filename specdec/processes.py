"""The three services as processes of this machine: start, wait until healthy, stop. Imports none of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import certificates as made
from specdec import rpc
from specdec.client import Client
from specdec.tls import Tls

_STOP_TIMEOUT_S = 15.0


class StartError(Exception):
    """A service did not come up; the message has the end of its log."""


@dataclass(slots=True)
class Service:
    """One running service."""

    name: str
    address: str
    process: asyncio.subprocess.Process
    log: IO[bytes]
    tls: Tls | None = None  # with which it is asked
    tls_name: str = ""

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def log_tail(self, num_lines: int = 12) -> str:
        lines = Path(self.log.name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


@contextlib.asynccontextmanager
async def service(module: str, port: int, arguments: Sequence[str]) -> AsyncIterator[Service]:
    """``python -m module`` on loopback; ``module`` may bring an argument. Stopped by SIGTERM at the end."""
    name, *first = module.split()
    log = tempfile.NamedTemporaryFile(prefix=f"specdec-{name}-", suffix=".log")  # noqa: SIM115
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        name,
        *first,
        f"--port={port}",
        *arguments,
        stdout=log,
        stderr=log,
        # Ctrl-C goes to the terminal's whole group; who stops whom, and in what order, is decided here.
        start_new_session=True,
    )
    try:
        yield Service(module, f"127.0.0.1:{port}", process, log)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        log.close()


@contextlib.asynccontextmanager
async def deployment(
    target: str, draft: str, port: int = 0, arguments: Sequence[str] = (), certificates: Path | None = None
) -> AsyncIterator[tuple[Service, Service, Service]]:
    """Target, draft and orchestrator, ready to generate. ``arguments`` are for both model services.

    With the directory of ``certificates`` (specdec.certificates) they speak TLS. Raises StartError.
    """
    target_port, draft_port, free_port = free_ports(3)

    def tls_flags(role: str) -> list[str]:
        files = (("cert", made.CERT), ("key", made.KEY), ("ca", made.CA)) if certificates else ()
        return [f"--tls-{what}={certificates}/{role}/{file}" for what, file in files]

    async with contextlib.AsyncExitStack() as stack:
        target_service = await stack.enter_async_context(
            service("target_service", target_port, [f"--model={target}", *tls_flags("target"), *arguments])
        )
        draft_service = await stack.enter_async_context(
            service("draft_service", draft_port, [f"--model={draft}", *tls_flags("draft"), *arguments])
        )
        orchestrator = await stack.enter_async_context(
            service(
                "orchestrator",
                port or free_port,
                [
                    f"--target={target_service.address}",
                    f"--draft={draft_service.address}",
                    f"--tokenizer={target}",
                    *tls_flags("orchestrator"),
                ],
            )
        )
        services = (target_service, draft_service, orchestrator)
        for each, role in zip(services, ("target", "draft", "orchestrator"), strict=True):
            if certificates:
                own = certificates / "operator"
                each.tls = Tls(str(own / made.CA), str(own / made.CERT), str(own / made.KEY))
                each.tls_name = role
            await healthy(each)
        await paired(orchestrator)
        yield services


async def healthy(service: Service, timeout_s: float = 600.0) -> None:
    """Returns once the service says SERVING. Raises StartError if it ends or does not in time."""
    for _ in range(int(timeout_s / 0.1)):
        if service.process.returncode is not None:
            raise StartError(f"{service.name} ended with status {service.process.returncode}:\n{service.log_tail()}")
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
        for _ in range(int(timeout_s / 0.1)):
            replicas = (await client.server_info()).replicas
            problem = "\n".join(f"{r.role} {r.address}: {r.problem}" for r in replicas if not r.ready)
            if not problem:
                return
            await asyncio.sleep(0.1)
    raise StartError(f"the orchestrator does not use all replicas:\n{problem}")


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

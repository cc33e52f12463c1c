"""A deployment on loopback for fault injection: processes that can be killed, frozen and restarted at one port, and
proxies between them. Knows processes; does not know faults and their pass criteria.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from specdec.cli.processes import StartError, free_ports, is_serving
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.core.rounds import Load
from specdec.security.tls import Tls
from specdec.transport import rpc
from specdec.transport.wire import read_load
from specdec.v1 import common_pb2, draft_pb2_grpc, generation_pb2, target_pb2_grpc
from testing.fault_proxy import FaultProxy
from testing.table_model import Table
from testing.traffic import Reference

Role = Literal["target", "draft"]
_STOP_TIMEOUT_S = 15.0


class Models(Protocol):
    """A target and a draft with at least 1,024 tokens. The attribute ``reference`` has the target's texts."""

    reference: Reference

    def service(self, role: Role, pass_ms: float) -> tuple[str, ...]:
        """The module and the flags of a service. ``pass_ms``: the time of a pass, where it can be chosen."""
        ...


class TableModels:
    """Table models, with the times and the faults that a row asks for."""

    def __init__(self) -> None:
        self.reference: Reference = Table()

    def service(self, role: Role, pass_ms: float) -> tuple[str, ...]:
        return f"testing.table_service {role}", f"--pass-ms={pass_ms}"


class Process:
    """``python -m MODULE --port=P ...``, which keeps its port when it is started again. ``port`` 0: a free port."""

    def __init__(
        self, module: str, arguments: Sequence[str], prefix: Sequence[str] = (), host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.module = module
        self.port = port or free_ports(1)[0]
        self.address = f"{host}:{self.port}"
        self.log = tempfile.NamedTemporaryFile(prefix="chaos-", suffix=".log")  # noqa: SIM115
        self.num_starts = 0
        self._command = [*prefix, sys.executable, "-m", *module.split(), f"--port={self.port}", f"--host={host}"]
        self._command += arguments if host == "127.0.0.1" else ["--insecure", *arguments]  # a private network
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.num_starts += 1
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=self.log, stderr=self.log, start_new_session=True
        )

    async def healthy(self, timeout_s: float = 600.0) -> None:
        """Wait until the process is alive. Raises StartError if it ends or is not alive within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not await is_serving(self.address, service=rpc.LIVENESS):
            if self.returncode is not None or time.monotonic() > deadline:
                raise StartError(f"{self.module} did not start:\n{self.log_tail()}")
            await asyncio.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    async def stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self.thaw()
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            await self.kill()

    async def ended(self, timeout_s: float) -> int | None:
        """Wait until the process ends without a signal from here; its exit status. Raises TimeoutError."""
        if self._process is not None:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        return self.returncode

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    @property
    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def log_tail(self, num_lines: int = 12) -> str:
        return "\n".join(Path(self.log.name).read_text(errors="replace").splitlines()[-num_lines:])

    def num_logged(self, words: str) -> int:
        """How often ``words`` are in the log."""
        return Path(self.log.name).read_text(errors="replace").count(words)


async def start(*processes: Process) -> None:
    """Start all of them. Returns when all are alive; raises StartError."""
    for process in processes:
        await process.start()
    for process in processes:
        await process.healthy()


@dataclass
class Deployment:
    """Targets and drafts, the orchestrator in front of them, and its client. ``proxies`` is by proxied process;
    ``make`` makes further processes, which end with the deployment."""

    targets: list[Process]
    drafts: list[Process]
    orchestrator: Process
    client: Client
    make: Callable[..., Process]
    proxies: dict[Process, FaultProxy] = field(default_factory=dict)

    @property
    def processes(self) -> list[Process]:
        return [*self.targets, *self.drafts, self.orchestrator]

    @property
    def model_services(self) -> list[tuple[Role, Process]]:
        return [("target", each) for each in self.targets] + [("draft", each) for each in self.drafts]

    def another_orchestrator(self, *flags: str) -> Process:
        """One more of the same replicas, not yet started."""
        replicas = replica_flags(*([each.address for each in role] for role in (self.targets, self.drafts)))
        return self.make("orchestrator", *replicas, *flags)

    async def loads(self) -> list[Load]:
        return [await load_of(process.address, role) for role, process in self.model_services]

    async def busiest_target(self) -> Process:
        live = [load.live_sequences for load in (await self.loads())[: len(self.targets)]]
        return self.targets[live.index(max(live))]

    async def replica(self, process: Process) -> generation_pb2.Replica:
        """The state of the process's replica in the orchestrator."""
        address = address_of(process, self.proxies)
        info = await self.client.server_info()
        return next(replica for replica in info.replicas if replica.address == address)

    async def ready(self, timeout_s: float = 30.0) -> float:
        """Seconds until the orchestrator uses all its replicas; infinity on a timeout."""
        return await until(lambda: uses_all(self.client), timeout_s)

    async def left(self, process: Process, timeout_s: float = 15.0) -> float:
        """Seconds until the orchestrator no longer uses this replica; infinity on a timeout."""

        async def unused() -> bool:
            return not (await self.replica(process)).ready

        return await until(unused, timeout_s, 0.01)

    async def freed(self, timeout_s: float = 15.0, open_streams: int | None = None) -> float:
        """Seconds until the model services have no sequences, no KV slots in use and ``open_streams`` streams each."""

        async def empty() -> bool:
            return all(
                load.live_sequences == load.kv_slots_used == 0
                and (open_streams is None or load.open_streams == open_streams)
                for load in await self.loads()
            )

        return await until(empty, timeout_s, 0.005)


def address_of(process: Process, proxies: Mapping[Process, FaultProxy]) -> str:
    """The address that an orchestrator uses: the proxy's, if there is one."""
    return f"127.0.0.1:{proxies[process].port}" if process in proxies else process.address


def replica_flags(targets: Iterable[str], drafts: Iterable[str] = ()) -> list[str]:
    """The flags of an orchestrator of the replicas at these addresses."""
    flags = {"--target": ",".join(targets), "--draft": ",".join(drafts)}
    return [f"{flag}={addresses}" for flag, addresses in flags.items() if addresses]


async def uses_all(client: Client, count: int | None = None) -> bool:
    """Whether the orchestrator uses all its replicas, and has ``count`` of them."""
    replicas = (await client.server_info()).replicas
    return all(replica.ready for replica in replicas) and count in (None, len(replicas))


async def until(predicate: Callable[[], Any], timeout_s: float, every_s: float = 0.05) -> float:
    """Seconds until the awaited ``predicate()`` is true; infinity after ``timeout_s``. SpecdecError counts as false."""
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        with contextlib.suppress(SpecdecError):
            if await predicate():
                return time.monotonic() - started
        await asyncio.sleep(every_s)
    return float("inf")


async def load_of(address: str, role: str, tls: Tls | None = None) -> Load:
    """The load that a model service reports."""
    async with rpc.channel(address, tls, role if tls else "") as channel:
        service: Any = target_pb2_grpc.TargetServiceStub if role == "target" else draft_pb2_grpc.DraftServiceStub
        return read_load((await service(channel).GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=5)).load)


class Lab:
    """Makes deployments of ``models``. ``chance`` is a seeded generator."""

    def __init__(self, seed: int, models: Models | None = None) -> None:
        self.chance = random.Random(seed)
        self.models = models or TableModels()

    @property
    def reference(self) -> Reference:
        return self.models.reference

    @asynccontextmanager
    async def processes(self) -> AsyncIterator[Callable[..., Process]]:
        """A factory of processes that are not yet started. All of them are stopped at the end."""
        processes: list[Process] = []

        def make(module: str, *arguments: str, **options: Any) -> Process:
            processes.append(Process(module, [*arguments, "--log-level=WARNING"], **options))
            return processes[-1]

        try:
            yield make
        finally:
            await asyncio.gather(*(process.stop() for process in processes))
            for process in processes:
                process.log.close()

    @asynccontextmanager
    async def deployment(
        self,
        num_targets: int = 1,
        num_drafts: int = 1,
        pass_ms: float = 10.0,
        step_ms: float = 1.0,
        target: Sequence[str] = (),
        draft: Sequence[str] = (),
        orchestrator: Sequence[str] = (),
        proxied: bool = False,
    ) -> AsyncIterator[Deployment]:
        """A deployment in which every replica is in use. Sequences are flags of their role. Raises StartError."""
        async with AsyncExitStack() as stack:
            make = await stack.enter_async_context(self.processes())
            targets = [make(*self.models.service("target", pass_ms), *target) for _ in range(num_targets)]
            drafts = [make(*self.models.service("draft", step_ms), *draft) for _ in range(num_drafts)]
            proxies: dict[Process, FaultProxy] = {}
            for process in (*targets, *drafts) if proxied else ():
                proxy = FaultProxy(process.port, seed=self.chance.getrandbits(30))
                proxies[process] = await stack.enter_async_context(proxy)
            addresses = ([address_of(each, proxies) for each in role] for role in (targets, drafts))
            front = make("orchestrator", *replica_flags(*addresses), *orchestrator)
            await start(*targets, *drafts, front)
            client = await stack.enter_async_context(Client(front.address))
            deployment = Deployment(targets, drafts, front, client, make, proxies)
            if await deployment.ready() == float("inf"):
                raise StartError(f"the orchestrator does not use all replicas: {await client.server_info()}")
            yield deployment

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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chaos.models import Models, Reference, TableModels
from specdec.cli.processes import StartError, free_ports, is_serving
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.core.rounds import Load
from specdec.security.tls import Tls
from specdec.transport import rpc
from specdec.transport.wire import read_load
from specdec.v1 import common_pb2, draft_pb2_grpc, generation_pb2, target_pb2_grpc
from testing.fault_proxy import FaultProxy

_STOP_TIMEOUT_S = 15.0


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

    def tracebacks(self) -> int:
        """The number of tracebacks in the log."""
        return Path(self.log.name).read_text(errors="replace").count("Traceback")


@dataclass
class Deployment:
    """Targets and drafts, the orchestrator in front of them, and its client. ``proxies`` is by proxied process."""

    targets: list[Process]
    drafts: list[Process]
    orchestrator: Process
    client: Client
    proxies: dict[Process, FaultProxy]

    async def loads(self) -> list[Load]:
        return [await load_of(each.address, role) for role, each in self.model_services]

    @property
    def model_services(self) -> list[tuple[str, Process]]:
        return [("target", each) for each in self.targets] + [("draft", each) for each in self.drafts]

    def address_of(self, process: Process) -> str:
        """The address that the orchestrator uses: the proxy's, if there is one."""
        return f"127.0.0.1:{self.proxies[process].port}" if process in self.proxies else process.address

    async def replica(self, process: Process) -> generation_pb2.Replica:
        """The state of the process's replica in the orchestrator."""
        wanted = self.address_of(process)
        info = await self.client.server_info()
        return next(each for each in info.replicas if each.address == wanted)

    async def ready(self, timeout_s: float = 30.0) -> float:
        """Seconds until the orchestrator uses all its replicas; infinity on a timeout."""

        async def all_ready() -> bool:
            return all(each.ready for each in (await self.client.server_info()).replicas)

        return await until(all_ready, timeout_s)

    async def left(self, process: Process, timeout_s: float = 15.0) -> float:
        """Seconds until the orchestrator no longer uses this replica; infinity on a timeout."""

        async def gone() -> bool:
            return not (await self.replica(process)).ready

        return await until(gone, timeout_s, 0.01)

    async def freed(self, timeout_s: float = 15.0, open_streams: int | None = None) -> float:
        """Seconds until the model services have no sequences, no KV slots in use and ``open_streams`` streams each."""

        async def empty() -> bool:
            return all(
                load.live_sequences == load.kv_slots_used == 0
                and (open_streams is None or load.open_streams == open_streams)
                for load in await self.loads()
            )

        return await until(empty, timeout_s, 0.005)


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
        stub: Any = (target_pb2_grpc.TargetServiceStub if role == "target" else draft_pb2_grpc.DraftServiceStub)(
            channel
        )
        return read_load((await stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=5)).load)


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
        made: list[Process] = []

        def make(module: str, *arguments: str, **options: Any) -> Process:
            made.append(Process(module, [*arguments, "--log-level=WARNING"], **options))
            return made[-1]

        try:
            yield make
        finally:
            await asyncio.gather(*(each.stop() for each in made))
            for each in made:
                each.log.close()

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
        extra_drafts: Sequence[str] = (),
    ) -> AsyncIterator[Deployment]:
        """A deployment in which every replica is in use. Sequences are flags of their role. Raises StartError."""
        async with AsyncExitStack() as stack:
            make = await stack.enter_async_context(self.processes())
            targets = [make(*self.models.service("target", pass_ms), *target) for _ in range(num_targets)]
            drafts = [make(*self.models.service("draft", step_ms), *draft) for _ in range(num_drafts)]
            proxies: dict[Process, FaultProxy] = {}
            if proxied:
                for each in (*targets, *drafts):
                    proxy = FaultProxy(each.port, seed=self.chance.getrandbits(30))
                    proxies[each] = await stack.enter_async_context(proxy)
            found = Deployment(targets, drafts, targets[0], None, proxies)  # type: ignore[arg-type]
            found.orchestrator = make(
                "orchestrator",
                "--target=" + ",".join(found.address_of(each) for each in targets),
                "--draft=" + ",".join([*(found.address_of(each) for each in drafts), *extra_drafts]),
                *orchestrator,
            )
            everything = (*targets, *drafts, found.orchestrator)
            for each in everything:
                await each.start()
            for each in everything:
                await each.healthy()
            found.client = await stack.enter_async_context(Client(found.orchestrator.address))
            if await found.ready() == float("inf") and not extra_drafts:
                raise StartError(f"the orchestrator does not use all replicas: {await found.client.server_info()}")
            yield found

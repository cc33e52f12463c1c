"""Real processes that are killed, stopped and frozen in mid-stream: every request ends, with its own text."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import Client, Sample
from specdec.errors import ReplicaLost
from specdec.v1 import common_pb2, generation_pb2, generation_pb2_grpc, target_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
"""Only a broken service takes that long, however busy the machine."""
LENGTH = 200
PROMPTS = ["def main():\n    ", "import os\n", "class Reader:\n    def __init__(self", "for line in open("]
REQUESTS: list[dict[str, Any]] = [
    {"text": prompt, "max_tokens": LENGTH, "seed": 5 + index, "temperature": temperature}
    for index, prompt in enumerate(PROMPTS)
    for temperature in (0.0, 0.8)
][:4]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass
class Service:
    """One service as a process on a port of its own, which may go and come back."""

    arguments: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", *self.arguments, "--port", str(self.port)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(PATIENCE_S)

    async def exit_status(self) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    def health(self) -> Any:
        """What it says of itself; None if it does not answer."""
        with grpc.insecure_channel(self.address) as channel:
            try:
                return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2).status
            except grpc.RpcError:
                return None

    def wait_until_serving(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.health() != health_pb2.HealthCheckResponse.SERVING:
            assert self.running, f"{self.arguments[0]} ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"{self.arguments[0]} does not serve:\n{self.log.read_text()}"
            time.sleep(0.1)


@dataclass
class Deployment:
    """Two targets, one draft, one orchestrator."""

    targets: list[Service]
    draft: Service
    orchestrator: Service
    expected: list[Sample] = field(default_factory=list)

    @property
    def services(self) -> list[Service]:
        return [*self.targets, self.draft, self.orchestrator]

    def make_whole(self) -> None:
        """Start what is not running; returns once every replica is used."""
        for service in self.services:
            if not service.running:
                service.start()
        for service in self.services:
            service.wait_until_serving()
        with grpc.insecure_channel(self.orchestrator.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            deadline = time.monotonic() + PATIENCE_S
            while True:
                info = stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=PATIENCE_S)
                if all(replica.ready for replica in info.replicas):
                    return
                assert time.monotonic() < deadline, info
                time.sleep(0.1)

    def stop(self) -> None:
        for service in self.services:
            if service.running:
                with contextlib.suppress(ProcessLookupError):
                    service.send(signal.SIGCONT)
                service.kill()

    def busiest_target(self) -> Service:
        """The one that has the most sequences at this moment."""

        def live(service: Service) -> int:
            with grpc.insecure_channel(service.address) as channel:
                stub = target_pb2_grpc.TargetServiceStub(channel)
                info = stub.GetModelInfo(common_pb2.GetModelInfoRequest(), timeout=PATIENCE_S)
                return int(info.load.live_sequences)

        return max(self.targets, key=live)

    def client(self) -> Client:
        return Client(self.orchestrator.address)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("processes")
    # A copy: nobody shall exchange the models between two starts.
    shutil.copytree(ROOT / "models" / "demo", directory / "demo")
    model = ["--threads", "1", "--shutdown-grace-s", "60", "--model"]
    ports = free_ports(4)

    def service(index: int, name: str, *arguments: str) -> Service:
        return Service([name, *arguments], ports[index], directory / f"{index}-{name}.log")

    first = service(0, "target_service", *model, str(directory / "demo" / "target"))
    second = service(1, "target_service", *model, str(directory / "demo" / "target"))
    draft = service(2, "draft_service", *model, str(directory / "demo" / "draft"))
    orchestrator = service(
        3,
        "orchestrator",
        *("--target", f"{first.address},{second.address}", "--draft", draft.address),
        *("--tokenizer", str(directory / "demo" / "target"), "--watchdog-s", "1", "--shutdown-grace-s", "60"),
        *("--num-draft-tokens", "5"),  # else a pair this small would soon not be drafting
    )
    running = Deployment([first, second], draft, orchestrator)
    try:
        running.make_whole()
        yield running
    finally:
        running.stop()


@pytest.fixture
async def deployment(processes: Deployment) -> Deployment:
    await asyncio.to_thread(processes.make_whole)
    if not processes.expected:
        async with processes.client() as client:
            processes.expected = [sample for [sample] in await asyncio.gather(*(run(client, r) for r in REQUESTS))]
        assert any(sample.finish.usage.completion_tokens == LENGTH for sample in processes.expected)
    return processes


async def run(client: Client, request: dict[str, Any], begun: asyncio.Event | None = None) -> list[Sample]:
    """One request; ``begun`` is set once its first chunk is there. The client asserts that positions are contiguous."""
    sample = Sample()
    async for response in client.stream(PATIENCE_S, **request):
        if response.HasField("chunk"):
            sample.add(response.chunk)
            if begun is not None:
                begun.set()
    return [sample]


async def disturbed(deployment: Deployment, disturb: Any) -> list[Sample]:
    """All requests at once; ``disturb`` is called when the first chunk of each is there. Asserts that texts stay."""
    begun = [asyncio.Event() for _ in REQUESTS]
    async with deployment.client() as client:
        tasks = [asyncio.create_task(run(client, r, b)) for r, b in zip(REQUESTS, begun, strict=True)]
        await asyncio.gather(*(event.wait() for event in begun))
        assert not all(task.done() for task in tasks), "too late to disturb anybody"
        disturb()
        samples = [sample for [sample] in await asyncio.gather(*tasks)]
    for sample, expected in zip(samples, deployment.expected, strict=True):
        assert sample.token_ids == expected.token_ids
        assert sample.text == expected.text
        assert sample.finish.reason == expected.finish.reason
    return samples


async def speculates(deployment: Deployment) -> bool:
    async with deployment.client() as client:
        [sample] = await run(client, {**REQUESTS[1], "max_tokens": 30})
        return sample.finish.speculation.num_drafts > 0


async def test_undisturbed_text_is_that_of_the_target_alone(deployment: Deployment) -> None:
    async with deployment.client() as client:
        for request, expected in zip(REQUESTS[:2], deployment.expected, strict=False):
            [alone] = await run(client, {**request, "num_draft_tokens": 0})
            assert alone.token_ids == expected.token_ids
            assert alone.finish.speculation.num_drafts == 0
            assert expected.finish.speculation.num_accepted_tokens > 0


async def test_the_draft_killed_in_mid_stream_is_done_without_and_used_again(deployment: Deployment) -> None:
    await disturbed(deployment, deployment.draft.kill)
    assert not await speculates(deployment)
    await asyncio.to_thread(deployment.make_whole)
    assert await speculates(deployment)


async def test_one_of_two_targets_killed_in_mid_stream_is_replaced(deployment: Deployment) -> None:
    samples = await disturbed(deployment, lambda: deployment.busiest_target().kill())
    assert sum(sample.finish.speculation.num_replays for sample in samples) > 0


async def test_a_target_and_a_draft_told_to_end_hand_over_and_exit_with_0(deployment: Deployment) -> None:
    ended: list[Service] = []

    def end() -> None:
        ended.extend([deployment.busiest_target(), deployment.draft])
        for service in ended:
            service.send(signal.SIGTERM)

    await disturbed(deployment, end)
    for service in ended:
        assert await service.exit_status() == 0, service.log.read_text()


async def test_an_orchestrator_told_to_end_finishes_what_runs_and_exits_with_0(deployment: Deployment) -> None:
    refused: list[Any] = []

    def end() -> None:
        deployment.orchestrator.send(signal.SIGTERM)

    async def refusal() -> None:
        """New requests and health are refused as soon as the signal has arrived."""
        while deployment.orchestrator.running:
            health = await asyncio.to_thread(deployment.orchestrator.health)
            if health != health_pb2.HealthCheckResponse.SERVING:
                async with deployment.client() as late:
                    with pytest.raises(ReplicaLost):
                        await run(late, {**REQUESTS[0], "max_tokens": 1})
                refused.append(health)
                return
            await asyncio.sleep(0.02)

    _, _ = await asyncio.gather(disturbed(deployment, end), refusal())
    assert await deployment.orchestrator.exit_status() == 0, deployment.orchestrator.log.read_text()
    assert refused


@pytest.mark.parametrize("which", ["target", "draft"])
async def test_a_frozen_replica_is_found_and_used_again(deployment: Deployment, which: str) -> None:
    frozen: list[Service] = []

    def freeze() -> None:
        frozen.append(deployment.busiest_target() if which == "target" else deployment.draft)
        frozen[0].send(signal.SIGSTOP)

    log_before = deployment.orchestrator.log.read_text()
    try:
        samples = await disturbed(deployment, freeze)
    finally:
        for service in frozen:
            service.send(signal.SIGCONT)
    if which == "target":
        assert sum(sample.finish.speculation.num_replays for sample in samples) > 0
    log = deployment.orchestrator.log.read_text().removeprefix(log_before)
    # A keepalive ping that was just due may be as fast as the watchdog of one second.
    assert re.search(f'"address": "{frozen[0].address}", "reason": "[^"]*(nothing was heard|ping timeout)', log), log
    await asyncio.to_thread(deployment.make_whole)
    assert await speculates(deployment)


async def test_an_orchestrator_that_was_killed_leaves_nothing_and_its_successor_says_the_same(
    deployment: Deployment,
) -> None:
    async with deployment.client() as client:
        begun = asyncio.Event()
        task = asyncio.create_task(run(client, REQUESTS[1], begun))
        await begun.wait()
        deployment.orchestrator.kill()
        with pytest.raises(ReplicaLost):
            await task
    await asyncio.to_thread(deployment.make_whole)
    await disturbed(deployment, lambda: None)


async def test_idle_services_told_to_end_exit_with_0(deployment: Deployment) -> None:
    for service in deployment.services:
        service.send(signal.SIGTERM)
    for service in deployment.services:
        assert await service.exit_status() == 0, service.log.read_text()

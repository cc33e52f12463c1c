"""``--processes 2``: one port, one scrape; what dies is replaced, and its requests resume; all end together."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from specdec.cli.processes import free_ports
from specdec.client import Client
from testing.lab import Deployment, Lab, until
from testing.traffic import Answer, Asked, ask, several
from tests.orchestrator.api.test_http import children, exists, page

pytestmark = pytest.mark.slow

_CLIENTS = 8


@asynccontextmanager
async def deployed(*flags: str) -> AsyncIterator[tuple[Deployment, list[Client]]]:
    """With two processes, and clients with a connection each: so many that both processes have some."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(Lab(1).deployment(orchestrator=["--processes=2", *flags]))
        address = running.orchestrator.address
        clients: dict[Client, str] = {}
        async with asyncio.timeout(60.0):
            while len(clients) < _CLIENTS or len({*clients.values()}) < 2:
                client = await stack.enter_async_context(Client(address))
                clients[client] = (await client.server_info()).instance
        yield running, list(clients)


async def begun(clients: list[Client], questions: list[Asked]) -> list[asyncio.Task[Answer]]:
    """A request of each client, which has begun to be answered."""
    asking = [asyncio.create_task(ask(client, question)) for client, question in zip(clients, questions, strict=True)]
    await asyncio.sleep(0.5)
    return asking


async def test_a_process_that_is_killed_is_replaced_and_its_requests_resume_with_equal_texts() -> None:
    async with deployed() as (running, clients):
        questions = several(len(clients), 150, random.Random(1))
        asking = await begun(clients, questions)
        victim, other = children(running.orchestrator.pid)
        os.kill(victim, signal.SIGKILL)
        async with Client(running.orchestrator.address) as late:
            assert not (await ask(late, questions[0])).error, "the port stays open"
        answers: list[Answer] = await asyncio.gather(*asking)
        assert [answer.error for answer in answers] == [None] * len(clients)
        assert all(answer.same(Lab(1).reference) for answer in answers)

        async def replaced() -> bool:
            return len(set(children(running.orchestrator.pid)) - {victim}) == 2

        assert await until(replaced, 15.0) < 15.0
        assert other in children(running.orchestrator.pid)


async def test_a_signal_ends_all_of_them_after_their_requests() -> None:
    async with deployed() as (running, clients):
        asking = await begun(clients, several(len(clients), 100, random.Random(1)))
        pids = children(running.orchestrator.pid)
        running.orchestrator.signal(signal.SIGTERM)
        answers = await asyncio.gather(*asking)
        assert all(answer.same(Lab(1).reference) and answer.error is None for answer in answers)
        assert await running.orchestrator.ended(20.0) == 0
        assert not any(map(exists, pids))


async def test_processes_end_with_their_parent() -> None:
    async with deployed() as (running, _):
        pids = children(running.orchestrator.pid)
        await running.orchestrator.kill()

        async def gone() -> bool:
            return not any(map(exists, pids))

        assert await until(gone, 15.0) < 15.0


async def test_one_scrape_has_the_sum_of_all_and_of_those_that_died() -> None:
    [port] = free_ports(1)

    def requests() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        name = 'gen_ai_server_request_duration_seconds_count{outcome="ok"}'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async with deployed(f"--metrics-port={port}") as (running, clients):
        await asyncio.gather(*map(ask, clients, several(len(clients), 5, random.Random(1))))

        async def counted() -> bool:
            return await asyncio.to_thread(requests) == len(clients)

        assert await until(counted, 10.0) < 10.0
        os.kill(children(running.orchestrator.pid)[0], signal.SIGKILL)
        async with Client(running.orchestrator.address) as late:
            await ask(late, several(1, 5, random.Random(1))[0])

        async def counted_all() -> bool:
            return await asyncio.to_thread(requests) == len(clients) + 1

        assert await until(counted_all, 15.0) < 15.0


async def test_settings_that_no_process_can_run_with_end_all_of_them_with_the_reason() -> None:
    async with Lab(1).processes() as make:
        orchestrator = make("orchestrator", "--target=127.0.0.1:1", "--processes=2", "--api-keys-file=/no/such/file")
        await orchestrator.start()
        assert await orchestrator.ended(30.0) == 2
        assert "/no/such/file" in orchestrator.log_tail()


async def test_gateways_share_a_port_too() -> None:
    [port] = free_ports(1)
    async with Lab(1).deployment() as running, Lab(1).processes() as make:
        gateway = make("gateway", f"--orchestrator={running.orchestrator.address}", "--processes=2", port=port)
        await gateway.start()
        assert await until(lambda: page(port, "/v1/models"), 20.0) < 20.0

        async def both() -> bool:
            return len(children(gateway.pid)) == 2

        assert await until(both, 10.0) < 10.0
        os.kill(children(gateway.pid)[0], signal.SIGKILL)
        assert await until(lambda: page(port, "/v1/models"), 20.0) < 20.0
        assert await until(both, 15.0) < 15.0
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended(20.0) == 0

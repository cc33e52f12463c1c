"""The lower bound for ``bench.micro.rounds``: the same processes and messages per round, with gRPC alone.

A client calls a middle process, which calls two echo servers one after the other and then answers. This is the cost of
a round without any code of this project, so figures of different machines can be compared relative to it.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import uvloop

from specdec.core.environment import DIRECT

_ECHO, _ROUNDS = "/bare/Echo", "/bare/Rounds"
_MESSAGE = b"x" * 64


def bare_round_ms(num_rounds: int, ports: Sequence[int]) -> float:
    """Milliseconds per round, the median over ``num_rounds`` of one sequence. Needs three free loopback ports."""
    middle, first, second = ports
    with _process(_serve_echo, first), _process(_serve_echo, second), _process(_serve_rounds, middle, first, second):
        return uvloop.run(_load(num_rounds, middle))


async def _load(num_rounds: int, port: int) -> float:
    gaps, last = [], 0.0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[DIRECT]) as channel:
        rounds: Any = channel.unary_stream(_ROUNDS)
        async for _ in rounds(str(num_rounds).encode(), wait_for_ready=True):
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
    return sorted(gaps)[len(gaps) // 2] * 1e3


async def _echo(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _rounds(channels: list[grpc.aio.Channel], request: bytes) -> AsyncIterator[bytes]:
    calls: list[Any] = [channel.stream_stream(_ECHO)(wait_for_ready=True) for channel in channels]
    for _ in range(int(request)):
        for call in calls:
            await call.write(_MESSAGE)
            await call.read()
        yield _MESSAGE
    for call in calls:
        call.cancel()


def _serve_echo(port: int) -> None:
    uvloop.run(_serve(port, _ECHO, grpc.stream_stream_rpc_method_handler(_echo)))


def _serve_rounds(port: int, *echoes: int) -> None:
    async def main() -> None:
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{echo}", options=[DIRECT]) for echo in echoes]

        async def rounds(request: bytes, _context: Any) -> AsyncIterator[bytes]:
            async for message in _rounds(channels, request):
                yield message

        await _serve(port, _ROUNDS, grpc.unary_stream_rpc_method_handler(rounds))

    uvloop.run(main())


async def _serve(port: int, method: str, handler: Any) -> None:
    server = grpc.aio.server()
    service, name = method.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


@contextmanager
def _process(target: Any, *arguments: int) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()

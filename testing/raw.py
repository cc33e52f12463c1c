"""A model service without an orchestrator: frames as an untrusted peer could write them, answers by sequence.

Knows frames; does not know which are right.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from draft_service.drafter import Drafter
from draft_service.server import create_server as create_draft_server
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client
from specdec.core.errors import SpecdecError, from_status
from specdec.core.rounds import Load
from specdec.core.settings import EngineSettings
from specdec.server.model_server import ModelServer
from specdec.transport import rpc
from specdec.transport.wire import read_load
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from target_service.server import create_server as create_target_server
from target_service.verifier import Verifier
from testing.lab import Role
from testing.patience import PATIENCE_S

COUPLED = common_pb2.VERIFICATION_METHOD_COUPLED
TOKEN = common_pb2.VERIFICATION_METHOD_TOKEN
BLOCK = common_pb2.VERIFICATION_METHOD_BLOCK
GREEDY = {"temperature": 0.0}


class Raw:
    """One open stream. ``answer(sequence)`` gives what came for it: a Verdict, a Growth or a SpecdecError."""

    def __init__(self, call: Any, request: type[Message]) -> None:
        self._call = call
        self._request = request
        self._inboxes: dict[int, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)
        self._reader = asyncio.create_task(self._read())
        self.frames: list[Any] = []
        self._heard = asyncio.Condition()

    async def _read(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for response in self._call:
                async with self._heard:
                    self.frames.append(response)
                    self._heard.notify_all()
                entries = response.verdicts if hasattr(response, "verdicts") else response.growths
                for entry in entries:
                    self._inboxes[entry.sequence].put_nowait(entry)
                for error in response.errors:
                    # 2 is UNKNOWN, 13 is INTERNAL: ours alone, never for what a caller sends.
                    assert error.status.code not in (2, 13), error
                    self._inboxes[error.sequence].put_nowait(from_status(error.status))

    @property
    def is_target(self) -> bool:
        return self._request is target_pb2.VerifyRequest

    async def send(self, **frame: Any) -> None:
        await self._call.write(self._request(**frame))

    async def ask(self, entry: Message) -> Any:
        """Send an open, a round or an advance; the next answer to its sequence."""
        [field] = [field for field in self._request.DESCRIPTOR.fields if field.message_type is entry.DESCRIPTOR]
        await self.send(**{field.name: [entry]})
        return await self.answer(entry.sequence)  # type: ignore[attr-defined]

    async def answer(self, sequence: int) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self._inboxes[sequence].get()

    async def error(self, sequence: int) -> SpecdecError:
        """The next answer, which must be an error; verdicts and growths before it are skipped."""
        while not isinstance(answer := await self.answer(sequence), SpecdecError):
            pass
        return answer

    def unread(self, sequence: int) -> int:
        return self._inboxes[sequence].qsize()

    async def frame_where(self, predicate: Any) -> Any:
        """The first frame, past or to come, for which ``predicate`` holds."""
        async with asyncio.timeout(PATIENCE_S), self._heard:
            seen = 0
            while True:
                for frame in self.frames[seen:]:
                    if predicate(frame):
                        return frame
                seen = len(self.frames)
                await self._heard.wait()

    async def half_close(self) -> None:
        await self._call.done_writing()

    async def status(self) -> grpc.StatusCode:
        """How the stream ended. Waits for that."""
        async with asyncio.timeout(PATIENCE_S):
            await self._reader
            code: grpc.StatusCode = await self._call.code()
            return code

    def cancel(self) -> None:
        self._call.cancel()

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        [error] = await asyncio.gather(self._reader, return_exceptions=True)
        if isinstance(error, AssertionError):
            raise error


class Service:
    """A model service behind a channel. ``server`` is there if it runs in this process."""

    server: ModelServer

    def __init__(self, channel: grpc.aio.Channel, role: Role) -> None:
        self.channel = channel
        if role == "target":
            stub: Any = target_pb2_grpc.TargetServiceStub(channel)
            self._method = stub.Verify
            self.request: type[Message] = target_pb2.VerifyRequest
        else:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            self._method, self.request = stub.Draft, draft_pb2.DraftRequest
        self._get_info = stub.GetModelInfo
        self.streams: list[Raw] = []

    def call(self, timeout_s: float | None = None) -> Any:
        """A stream as gRPC has it, which the caller ends."""
        return self._method(timeout=timeout_s)

    def stream(self, timeout_s: float | None = None) -> Raw:
        raw = Raw(self.call(timeout_s), self.request)
        self.streams.append(raw)
        return raw

    async def info(self) -> common_pb2.GetModelInfoResponse:
        """What the service tells of itself over gRPC."""
        answer: common_pb2.GetModelInfoResponse = await self._get_info(
            common_pb2.GetModelInfoRequest(), timeout=PATIENCE_S
        )
        return answer

    async def load(self) -> Load:
        return read_load((await self.info()).load)

    async def nothing_left(self, open_streams: int = 0) -> None:
        """Returns once no sequence, slot or stream is left."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                load = await self.load()
                if (load.live_sequences, load.waiting_sequences, load.kv_slots_used) == (0, 0, 0) and (
                    load.open_streams == open_streams
                ):
                    return
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for stream in self.streams:
            await stream.close()


class Startable(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


Server = TypeVar("Server", bound=Startable)


@asynccontextmanager
async def started(server: Server) -> AsyncIterator[Server]:
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def orchestrator(
    targets: Sequence[int], drafts: Sequence[int] = (), **settings: Any
) -> AsyncIterator[tuple[OrchestratorServer, Client]]:
    """An orchestrator of the replicas that listen on these ports, and a client of it."""
    async with (
        started(
            OrchestratorServer(
                OrchestratorSettings(
                    target=[f"127.0.0.1:{port}" for port in targets],
                    draft=[f"127.0.0.1:{port}" for port in drafts],
                    **{"num_draft_tokens": 5, **settings},
                )
            )
        ) as server,
        Client(f"127.0.0.1:{server.port}") as client,
    ):
        yield server, client


@asynccontextmanager
async def target(verifier: Verifier[Any], **settings: Any) -> AsyncIterator[Service]:
    async with _serving(create_target_server(verifier, EngineSettings(**settings)), "target") as service:
        yield service


@asynccontextmanager
async def draft(drafter: Drafter) -> AsyncIterator[Service]:
    async with _serving(create_draft_server(drafter, EngineSettings()), "draft") as service:
        yield service


@asynccontextmanager
async def _serving(server: ModelServer, role: Role) -> AsyncIterator[Service]:
    async with started(server), service_at(f"127.0.0.1:{server.port}", role) as service:
        service.server = server
        yield service


@asynccontextmanager
async def service_at(address: str, role: Role) -> AsyncIterator[Service]:
    """A service that runs elsewhere."""
    async with rpc.channel(address) as channel:
        service = Service(channel, role)
        try:
            yield service
        finally:
            await service.close()


def spec(
    token_ids: Any = (1, 2, 3), method: Any = COUPLED, temperature: float = 1.0, top_p: float = 1.0, **fields: Any
) -> common_pb2.SequenceSpec:
    sampling = fields.pop("sampling", None) or common_pb2.SamplingParams(temperature=temperature, top_p=top_p)
    fields.setdefault("num_prompt_tokens", len(token_ids))
    return common_pb2.SequenceSpec(token_ids=token_ids, sampling=sampling, method=method, **fields)


def target_open(sequence: int, **fields: Any) -> target_pb2.TargetOpen:
    options = {name: fields.pop(name) for name in ("more", "stop_token_ids", "adapter") if name in fields}
    return target_pb2.TargetOpen(sequence=sequence, spec=fields.pop("spec", None) or spec(**fields), **options)


def draft_open(sequence: int, max_nodes: int = 0, max_ahead: int = 0, **fields: Any) -> draft_pb2.DraftOpen:
    budget = draft_pb2.DraftBudget(max_nodes=max_nodes, max_depth=max_nodes, max_ahead=max_ahead)
    more = fields.pop("more", False)
    opened = fields.pop("spec", None) or spec(**fields)
    return draft_pb2.DraftOpen(sequence=sequence, spec=opened, budget=budget, more=more)


def tree(token_ids: Any = (), parents: Any = (), probs: Any = ()) -> common_pb2.TokenTree:
    """``probs``: per node (token ids, weights)."""
    return common_pb2.TokenTree(
        token_ids=token_ids,
        parents=parents,
        draft_probs=[common_pb2.SparseDistribution(token_ids=ids, weights=weights) for ids, weights in probs],
    )


def round_(
    sequence: int, number: int, base: int, tree_: common_pb2.TokenTree | None = None, num_autonomous: int = 0
) -> Any:
    return target_pb2.Round(sequence=sequence, number=number, base=base, tree=tree_, num_autonomous=num_autonomous)


def advance(
    sequence: int, number: int, base: int, token_ids: Any = (), max_nodes: int = 2, **fields: Any
) -> draft_pb2.Advance:
    budget = draft_pb2.DraftBudget(
        max_nodes=max_nodes, max_depth=fields.pop("max_depth", max_nodes), max_ahead=fields.pop("max_ahead", 0)
    )
    return draft_pb2.Advance(sequence=sequence, number=number, base=base, token_ids=token_ids, budget=budget, **fields)


def after(base: int, verdict: target_pb2.Verdict) -> int:
    """The base once ``verdict`` is committed."""
    assert verdict.base == base, verdict
    return base + len(verdict.accepted) + 1

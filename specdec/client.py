"""A small asynchronous client of GenerationService. Every error is a SpecdecError.

After the loss of an orchestrator, a request resumes at the next address, or at the only one, with the ids received so
far, and no token is lost or repeated. Under token and block verification it does not resume. Certificate files are read
again when they change.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.core.errors import DeadlineExceeded, Draining, GivenUp, ModelMismatch, ReplicaLost, SpecdecError
from specdec.core.sequence import Method
from specdec.security.tls import Tls
from specdec.transport import rpc
from specdec.transport.endpoint import is_refused
from specdec.transport.wire import read_method
from specdec.v1 import generation_pb2, generation_pb2_grpc

__all__ = ["Client", "Sample", "SpecdecError", "Tls"]

Metadata = Sequence[tuple[str, str]]

_ROUNDS = 3
"""Attempts per address in a row without new ids before a request fails."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 2.0
"""The doubling pause between attempts. There is none after the first loss, which probably is of one server only."""
_MAX_DEATHS, _MAX_DEATHS_IN_ALL = 2, 4
"""A request may be what ends its orchestrators. So many deaths in a row end it; with new ids between them, twice as
many do, because new ids prove the text so far harmless."""
_FATE_TIMEOUT_S = 1.0
_FATE_PAUSE_S = 0.05


@dataclass(slots=True)
class Sample:
    """The received part of one sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)  # generation_pb2.TokenOrigin, one per id
    text_ends: list[int] = field(default_factory=list)  # per id, the end of its text in characters
    finish: generation_pb2.Finish = field(default_factory=generation_pb2.Finish)

    @property
    def finished(self) -> bool:
        return bool(self.finish.reason)

    def add(self, chunk: generation_pb2.Chunk) -> None:
        """Append a chunk. Raises ValueError if a chunk was lost or repeated."""
        if chunk.first_position != len(self.token_ids):
            raise ValueError(f"a chunk begins at {chunk.first_position}, {len(self.token_ids)} ids were received")
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        self.origins.extend(chunk.origins)
        self.text_ends.extend(chunk.text_ends)
        if chunk.HasField("finish"):
            self.finish.CopyFrom(chunk.finish)


class Client:
    """``async with Client("host:port") as client``. Further addresses are used when the first one is lost; a single one
    is used again, because it may be the name of several orchestrators.

    ``tls`` needs only a CA here; the servers' certificates must have the DNS name ``tls_name``, or the host if that is
    empty. ``api_key`` is needed if the deployment has API keys. Raises ValueError without an address.
    """

    def __init__(
        self, *addresses: str, tls: Tls | None = None, tls_name: str = "orchestrator", api_key: str = ""
    ) -> None:
        if not addresses:
            raise ValueError("at least one address is required")
        self._lines = [_Line(address, tls, tls_name) for address in addresses]
        self._metadata = rpc.bearer(api_key)
        self._at = 0  # index of the address in use

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for line in self._lines:
            await line.close()

    async def stream(
        self, timeout_s: float | None = None, metadata: Metadata = (), **fields: Any
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the responses to a GenerateRequest with these fields, from any orchestrator. ``metadata``: of this call
        alone, such as x-request-id. Raises SpecdecError; ModelMismatch if the request would resume with another model.
        """
        request = generation_pb2.GenerateRequest(**fields)
        samples = _resumed(request)
        started = time.monotonic()
        model_digest: str | None = None  # set at the first admission
        num_prompt_tokens = 0  # received
        lost_in_a_row = 0  # losses since the last new ids; an admission alone is no progress
        losses: list[_Loss] = []
        while True:
            at = self._at
            try:
                responses_of = self._once(at, request, losses, timeout_s=_left_s(started, timeout_s), metadata=metadata)
                async with aclosing(responses_of) as responses:
                    async for response in responses:
                        if response.HasField("chunk"):
                            sample = samples.setdefault(response.chunk.index, Sample())
                            if sample.finished:
                                continue  # after a resume the finish of a finished sample is sent again
                            sample.add(response.chunk)
                            if response.chunk.token_ids or sample.finished:
                                lost_in_a_row = 0
                        elif response.HasField("prompt"):
                            if response.prompt.first_position < num_prompt_tokens:
                                continue  # after a resume the prompt is sent again
                            num_prompt_tokens += len(response.prompt.token_ids)
                        elif response.HasField("round"):
                            pass
                        elif model_digest is None:
                            model_digest, request.seed = response.admission.model_digest, response.admission.seed
                        elif response.admission.model_digest == model_digest:
                            continue
                        else:
                            raise ModelMismatch(
                                f"{self._lines[at].address} serves the model {response.admission.model_digest[:12]},"
                                f" the request began with {model_digest[:12]}"
                            )
                        yield response
                    return
            except ReplicaLost as error:
                lost_in_a_row += 1
                await self._refuse_harm(losses, lost_in_a_row, metadata, left_s=_left_s(started, timeout_s))
                resumes = model_digest is None or _keeps_its_law(request)
                if lost_in_a_row >= _ROUNDS * len(self._lines) or not resumes:
                    raise
                if self._at == at:  # many requests lose one address together; only the first one moves on
                    self._at = (at + 1) % len(self._lines)
                for index, sample in samples.items():
                    request.resume[index].token_ids[:] = sample.token_ids
                left_s = _left_s(started, timeout_s)
                pause_s = _pause_s(lost_in_a_row)
                if left_s is not None and pause_s >= left_s:
                    raise DeadlineExceeded(f"no time is left to try again: {error}") from error
                await asyncio.sleep(pause_s)

    async def _once(
        self,
        at: int,
        request: generation_pb2.GenerateRequest,
        losses: list[_Loss],
        *,
        timeout_s: float | None,
        metadata: Metadata,
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The responses of one attempt. Its failure is appended to ``losses``."""
        async with self._lines[at].stub() as stub:
            call = stub.Generate(request, timeout=timeout_s, metadata=(*self._metadata, *metadata))
            try:
                instance = str((await call.initial_metadata()).get(rpc.INSTANCE, ""))
                async for response in call:
                    yield response
            except grpc.aio.AioRpcError as error:
                raised = rpc.error_of(error)
                losses.append(_Loss(self._lines[at], "" if isinstance(raised, Draining) else instance))
                raise raised from error
            finally:
                # Without this an abandoned call is never collected as garbage.
                call.cancel()

    async def _refuse_harm(
        self, losses: list[_Loss], lost_in_a_row: int, metadata: Metadata, left_s: float | None
    ) -> None:
        """Raises GivenUp if too many orchestrators died under a request. It asks only once enough of them are lost, so
        that a first loss costs no time."""
        metadata = (*self._metadata, *metadata)
        wait_s = _FATE_TIMEOUT_S if left_s is None else min(left_s, _FATE_TIMEOUT_S)
        for suspects, limit in ((losses[-lost_in_a_row:], _MAX_DEATHS), (losses, _MAX_DEATHS_IN_ALL)):
            lines = {loss.instance: loss.line for loss in suspects if loss.instance}
            if len(lines) >= limit:
                deaths = (line.died(instance, metadata, wait_s) for instance, line in lines.items())
                if (num_deaths := sum(await asyncio.gather(*deaths))) >= limit:
                    raise GivenUp(f"orchestrators died {num_deaths} times under this request; it is not tried again")

    async def generate(self, timeout_s: float | None = None, **fields: Any) -> list[Sample]:
        """All samples of a request, by index. Raises SpecdecError.

        If the request resumes with given ids, these are in ``token_ids`` only: their text and origins are not sent.
        """
        resumed = _resumed(generation_pb2.GenerateRequest(**fields))
        samples = [resumed.get(index, Sample()) for index in range(fields.get("n") or 1)]
        async for response in self.stream(timeout_s, **fields):
            if response.HasField("chunk"):
                samples[response.chunk.index].add(response.chunk)
        return samples

    async def server_info(
        self, timeout_s: float = 5.0, metadata: Metadata = ()
    ) -> generation_pb2.GetServerInfoResponse:
        """The models, replicas and load of an orchestrator. Raises SpecdecError."""
        request = generation_pb2.GetServerInfoRequest()
        info: generation_pb2.GetServerInfoResponse = await self._call(
            "GetServerInfo", request, timeout_s=timeout_s, metadata=metadata
        )
        return info

    async def tokenize(
        self, timeout_s: float = 30.0, metadata: Metadata = (), **fields: Any
    ) -> generation_pb2.TokenizeResponse:
        """The ids of the prompt of a TokenizeRequest with these fields. Raises SpecdecError."""
        request = generation_pb2.TokenizeRequest(**fields)
        response: generation_pb2.TokenizeResponse = await self._call(
            "Tokenize", request, timeout_s=timeout_s, metadata=metadata
        )
        return response

    async def detokenize(
        self,
        token_ids: Iterable[int],
        skip_special_tokens: bool = False,
        timeout_s: float = 30.0,
        metadata: Metadata = (),
    ) -> str:
        """The text of ids. Raises SpecdecError."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        response: generation_pb2.DetokenizeResponse = await self._call(
            "Detokenize", request, timeout_s=timeout_s, metadata=metadata
        )
        return response.text

    async def serving(self, timeout_s: float = 2.0) -> bool:
        """Whether an orchestrator has a target that is ready."""
        for line in self._lines:
            with suppress(grpc.aio.AioRpcError):
                call = health_pb2_grpc.HealthStub(line.channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=timeout_s
                )
                if (await call).status == health_pb2.HealthCheckResponse.SERVING:
                    return True
        return False

    async def _call(self, method: str, request: Any, *, timeout_s: float, metadata: Metadata) -> Any:
        """The answer of the first orchestrator that can be reached, from the one in use on."""
        for attempt in range(len(self._lines)):
            async with self._lines[(self._at + attempt) % len(self._lines)].stub() as stub:
                call = getattr(stub, method)(request, timeout=timeout_s, metadata=(*self._metadata, *metadata))
                try:
                    return await call
                except grpc.aio.AioRpcError as error:
                    raised = rpc.error_of(error)
            if not isinstance(raised, ReplicaLost) or attempt + 1 == len(self._lines):
                raise raised


class _Line:
    """The channel to one address. A channel keeps the certificates that it was made with. After a change of the files
    the next call opens a new channel, and the old one is closed when its last call has ended."""

    def __init__(self, address: str, tls: Tls | None, tls_name: str) -> None:
        self.address, self._tls, self._tls_name = address, tls, tls_name
        self._num_calls: dict[grpc.aio.Channel, int] = {}
        self._open()

    def _open(self) -> None:
        self._version = self._tls.version if self._tls else 0
        self.channel = rpc.channel(self.address, self._tls, self._tls_name, public=True)
        self._num_calls[self.channel] = 0

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[generation_pb2_grpc.GenerationServiceStub]:
        """A stub for one call."""
        if self._tls is not None and self._tls.changed_since(self._version):
            before = self.channel
            self._open()
            await self._close_unused(before)
        channel = self.channel
        self._num_calls[channel] += 1
        try:
            yield generation_pb2_grpc.GenerationServiceStub(channel)
        finally:
            self._num_calls[channel] -= 1
            await self._close_unused(channel)

    async def died(self, instance: str, metadata: Metadata, timeout_s: float) -> bool:
        """Whether this process, which was lost without a drain, has died: its address refuses connections, or another
        process answers there. False if that cannot be learned in time.

        Behind a name of several orchestrators the answer may be a neighbour's, and the loss a cut in the network. It
        counts as a death all the same: that may end one request, while the opposite may cost every orchestrator there.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self.stub() as stub:
                while True:
                    try:
                        info = await stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), metadata=metadata)
                        return bool(info.instance != instance)
                    except grpc.aio.AioRpcError:
                        if await is_refused(self.address):
                            return True
                    # Something listens, but the channel has not connected to it yet.
                    await asyncio.sleep(_FATE_PAUSE_S)
        return False

    async def _close_unused(self, channel: grpc.aio.Channel) -> None:
        if channel is not self.channel and not self._num_calls.get(channel, 1):
            del self._num_calls[channel]
            await channel.close()

    async def close(self) -> None:
        for channel in self._num_calls:
            await channel.close()


@dataclass(frozen=True, slots=True)
class _Loss:
    """A failed attempt. ``instance``: the process that had the request; empty if none had it, or if it drained."""

    line: _Line
    instance: str


def _pause_s(lost_in_a_row: int) -> float:
    """The pause before the next attempt. It is random, so that clients of lost servers do not return together."""
    if lost_in_a_row < 2:
        return 0.0
    return min(_FIRST_PAUSE_S * 2.0 ** (lost_in_a_row - 2), _MAX_PAUSE_S) * random.uniform(0.5, 1.0)


def _left_s(started: float, timeout_s: float | None) -> float | None:
    return None if timeout_s is None else max(0.0, started + timeout_s - time.monotonic())


def _keeps_its_law(request: generation_pb2.GenerateRequest) -> bool:
    """Whether the output keeps its distribution when it resumes. Under token and block verification a token that was
    held back, because of what it is, would be drawn again."""
    method = read_method(request.verification) or Method.COUPLED
    return method.keyed_by_token(request.temperature if request.HasField("temperature") else 1.0)


def _resumed(request: generation_pb2.GenerateRequest) -> dict[int, Sample]:
    """Samples with the ids that the request resumes with, by index."""
    return {index: Sample(token_ids=list(ids.token_ids)) for index, ids in request.resume.items()}

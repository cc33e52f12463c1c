"""The replicas of one role: which can be used now, and why the others cannot.

Knows addresses, connections and fingerprints; refuses to know sequences. Each replica is kept connected by a task
of its own; whoever needs one picks the least busy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from orchestrator.link import HostileReplica, Lane, Link
from specdec import rpc, wire
from specdec.errors import ModelMismatch, ReplicaLost, SpecdecError
from specdec.rounds import ModelInfo
from specdec.v1 import common_pb2

log = logging.getLogger(__name__)

_INFO_TIMEOUT_S = 2.0
_QUARANTINE_S = 30.0


class Replica:
    """One address. ``link`` is there while it can be used; otherwise ``problem`` says why not."""

    def __init__(self, address: str, role: str) -> None:
        self.address = address
        self.role = role
        self.info: ModelInfo | None = None
        self.link: Link | None = None
        self.problem = "not reached yet"
        self._hostile: asyncio.Event = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.link is not None and not self.link.draining

    def lane(self) -> Lane:
        if self.link is None:
            raise ReplicaLost(f"{self.role} {self.address}: {self.problem}")
        return self.link.lane()

    def set_aside(self, reason: str) -> None:
        """Stop using it for a while: it broke the contract."""
        log.warning("replica set aside", extra={"role": self.role, "address": self.address, "reason": reason})
        self.problem, self.link = f"set aside: {reason}", None
        self._hostile.set()

    async def keep_connected(
        self,
        connect: Callable[[grpc.aio.Channel, ModelInfo], Link],
        get_info: Callable[[grpc.aio.Channel], grpc.aio.UnaryUnaryMultiCallable[Any, Any]],
        admit: Callable[[Replica, ModelInfo], None],
        changed: Callable[[], None],
    ) -> None:
        """Until cancelled: connect, compare, carry the stream, and again after it ended.

        ``admit`` raises SpecdecError if this model cannot be used here.
        """
        while True:
            retrying = AsyncRetrying(
                retry=retry_if_exception_type(SpecdecError),
                wait=wait_random_exponential(multiplier=0.1, max=1.0),
                before_sleep=self._note,
            )
            async with rpc.channel(self.address) as channel:
                async for attempt in retrying:
                    with attempt:
                        info = await _model_info(get_info(channel))
                        admit(self, info)
                link = connect(channel, info)
                self.info, self.link, self.problem = info, link, ""
                self._hostile.clear()
                changed()
                log.info("replica connected", extra={"role": self.role, "address": self.address})
                await self._carry(link)
            changed()

    async def _carry(self, link: Link) -> None:
        stream = asyncio.create_task(link.run())
        hostile = asyncio.create_task(self._hostile.wait())
        try:
            await asyncio.wait({stream, hostile}, return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                error = stream.exception()
                self.problem, self.link = str(error), None
                log.warning("replica lost", extra={"role": self.role, "address": self.address, "reason": str(error)})
                if isinstance(error, HostileReplica):
                    self.set_aside(str(error))
        finally:
            self.link = None
            for task in (stream, hostile):
                task.cancel()
            await asyncio.gather(stream, hostile, return_exceptions=True)
        if self._hostile.is_set():
            await asyncio.sleep(_QUARANTINE_S)

    def _note(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, ModelMismatch) and self.problem != str(error):
            log.error("replica refused", extra={"role": self.role, "address": self.address, "reason": str(error)})
        self.problem = str(error)


async def _model_info(get_info: grpc.aio.UnaryUnaryMultiCallable[Any, Any]) -> ModelInfo:
    try:
        response: common_pb2.GetModelInfoResponse = await get_info(
            common_pb2.GetModelInfoRequest(), timeout=_INFO_TIMEOUT_S
        )
    except grpc.aio.AioRpcError as error:
        raise rpc.error_of(error) from error
    return wire.read_info(response.model)


class Pool:
    """All replicas of one role. ``async with`` keeps them connected."""

    def __init__(
        self,
        role: str,
        addresses: Sequence[str],
        connect: Callable[[grpc.aio.Channel, ModelInfo], Link],
        get_info: Callable[[grpc.aio.Channel], grpc.aio.UnaryUnaryMultiCallable[Any, Any]],
        admit: Callable[[Replica, ModelInfo], None],
    ) -> None:
        self.replicas = [Replica(address, role) for address in addresses]
        self._role = role
        self._connect = connect
        self._get_info = get_info
        self._admit = admit
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Pool:
        self._tasks = [
            asyncio.create_task(replica.keep_connected(self._connect, self._get_info, self._admit, self._changed.set))
            for replica in self.replicas
        ]
        for task in self._tasks:
            task.add_done_callback(_report)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def info(self) -> ModelInfo | None:
        """The model of the replicas that can be used now."""
        return next((replica.info for replica in self.replicas if replica.ready), None)

    def pick(self, avoid: Replica | None = None) -> Replica | None:
        """The least busy of the replicas that can be used now; ``avoid`` only if there is no other."""
        ready = [replica for replica in self.replicas if replica.ready]
        return min(ready, key=lambda each: (each is avoid, each.link.num_lanes if each.link else 0), default=None)

    async def wait_for_one(self, timeout_s: float, avoid: Replica | None = None) -> Replica:
        """As ``pick``, but waits. Raises ReplicaLost, saying what is wrong with each, after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while (replica := self.pick(avoid)) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return replica
        except TimeoutError:
            problems = "; ".join(f"{replica.address}: {replica.problem}" for replica in self.replicas)
            raise ReplicaLost(f"no {self._role} could be reached in {timeout_s:g} s ({problems})") from None


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a replica is no longer kept connected", exc_info=error)

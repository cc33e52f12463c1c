"""One endpoint of a model service: connects, checks the model, and carries the stream until it is lost; then again.

Knows the endpoint's health, latency and process; does not know its neighbours (orchestrator.replicas.pool).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from orchestrator.replicas.choice import PrefixCounts
from orchestrator.replicas.ejection import Ejection
from orchestrator.replicas.health import Health
from orchestrator.replicas.lane import Lane
from orchestrator.replicas.link import HostileReplica, Link, WatchdogFired
from orchestrator.replicas.load_score import LoadScore
from specdec.core.errors import ModelMismatch, ReplicaLost, SpecdecError
from specdec.core.rounds import Load, ModelInfo
from specdec.security.tls import Tls
from specdec.security.tls_diagnosis import tls_problem
from specdec.transport import rpc, wire
from specdec.transport.endpoint import is_refused
from specdec.v1 import common_pb2

log = logging.getLogger(__name__)

_INFO_TIMEOUT_S = 2.0
_LOSSES = ("DRAINING", "EJECTED", "REPLICA_LOST", "WATCHDOG_FIRED")
_SHORT_STREAM_S = 5.0
"""A stream that ends this early puts its replica on probation, so that not all sequences return to it at once."""
_MAX_PAUSE_S = 1.0
"""Between streams that end before any response."""


class _NoConnection(ReplicaLost):
    """The two ends do not agree on TLS. A retry does not help."""


@dataclass(slots=True)
class Tally:
    """The totals of one draft replica since the endpoint was found, updated once per round.

    A round counts for the replica that its sequence has at the end of the round.
    """

    num_rounds: int = 0  # with draft tokens
    num_draft_tokens: int = 0  # verified
    num_accepted_tokens: int = 0
    num_late: int = 0  # rounds past the draft deadline
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Role:
    """The differences between targets and drafts for this module."""

    name: str
    stub: Callable[[grpc.aio.Channel], Any]
    connect: Callable[[Any, ModelInfo], Link]
    """The link of a stub to a model."""
    admit: Callable[[str, ModelInfo], None]
    """Raises SpecdecError if the model at this address cannot be used here."""
    tls: Tls | None = None


class Replica:
    """One endpoint. ``link`` is set while it is connected; otherwise ``problem`` says why it is not."""

    def __init__(self, address: str, role: Role) -> None:
        self.address = address
        self.role = role
        self.info: ModelInfo | None = None
        self.link: Link | None = None
        self.problem = "not reached yet"
        self.health = Health()
        self.load = LoadScore()
        self.losses = Counter(dict.fromkeys(_LOSSES, 0))  # by reason; zeros, so that metrics show the first loss
        self._tokens: tuple[str, tuple[bytes, ...]] = ("", ())  # of a refused instance
        self.num_kv_slots = 0  # of the present or last model at this address; 0: not known
        self.num_refused = 0  # opens refused because the replica was full; each retry counts
        self.tally = Tally()  # used for drafts only
        self.prefixes = PrefixCounts()
        self._ejection = Ejection()
        self._ejected = asyncio.Event()
        self._num_silent = 0  # streams in a row that ended before any response

    @property
    def in_use(self) -> bool:
        """Connected and not draining: it has sequences, or will get some."""
        return self.link is not None and not self.link.lost and not self.link.draining

    @property
    def ready(self) -> bool:
        """Usable for new sequences."""
        return self.in_use and self.health.serving and not self._ejected.is_set()

    @property
    def why_not(self) -> str:
        """Why it is not ready; empty if it is ready."""
        if self.problem or self.link is None:
            return self.problem
        if self.link.lost:
            return "its stream has ended"
        if self.link.draining:
            return "it is draining"
        return "" if self.health.serving else "it says that it is not serving"

    def can(self, needs: frozenset[str]) -> bool:
        """Whether the model behind it has these capabilities."""
        return not needs or (self.info is not None and needs.issubset(self.info.capabilities))

    def fits(self, num_tokens: int) -> bool:
        """Whether its KV cache is large enough for ``num_tokens`` when empty, or of unknown size."""
        return not self.num_kv_slots or num_tokens < self.num_kv_slots

    @property
    def trusted(self) -> bool:
        """False on probation (after an ejection or a short stream) while it has a sequence: it gets one at a time."""
        return not self._ejection.on_probation or (self.link is not None and self.link.num_lanes == 0)

    @property
    def score(self) -> float:
        """Roughly the wait of a new sequence here; smaller is better."""
        return float("inf") if self.link is None else self.load.wait_s(self.num_live)

    @property
    def num_live(self) -> int:
        """Open sequences: this orchestrator's now, and those of others by the last report."""
        return self.link.num_lanes + self.link.num_others if self.link is not None else 0

    @property
    def model_digest(self) -> str:
        """Of the present or last model at this address; empty: not known."""
        return self.info.model_digest if self.info else ""

    def lane(self) -> Lane:
        if self.link is None:
            raise ReplicaLost(f"{self.role.name} {self.address}: {self.problem}")
        return self.link.lane()

    @property
    def instance(self) -> str:
        """The present or last process at this address."""
        return self.info.instance if self.info else ""

    @property
    def num_passes(self) -> int:
        """Passes that the model has made by its last report; 0: not connected."""
        return self.link.load.passes if self.link is not None else 0

    @property
    def num_sequences(self) -> int:
        """Open sequences of all orchestrators by its last report; 0: not connected."""
        return self.link.load.live_sequences if self.link is not None else 0

    def observe_pass(self, pass_s: float) -> None:
        """A pass of the model took this long."""
        if self.link is not None:
            self.link.observe_pass(pass_s)

    def count_answer(self) -> None:
        """It gave a valid answer, which shortens its probation."""
        self._ejection.count_answer()

    def observe_latency(self, latency_s: float) -> None:
        """An answer took this long."""
        self.count_answer()
        self.load.observe_latency(latency_s, self.num_sequences)

    def eject(self, reason: str) -> None:
        """Eject it for a while, twice as long each time. Its sequences move to other replicas."""
        if not self._ejected.is_set():
            self._log(logging.WARNING, "replica ejected", reason=reason)
            self.losses["EJECTED"] += 1
            self.problem = f"ejected: {reason}"
            self._ejected.set()

    def compare(self) -> None:
        """Check its model again against the other replicas, which may have changed; eject it on a mismatch."""
        if self.link is not None and self.info is not None:
            try:
                self.role.admit(self.address, self.info)
            except ModelMismatch as error:
                self.eject(str(error))
            except ReplicaLost:  # there is no replica to compare it with
                pass

    async def is_dead(self, instance: str, timeout_s: float) -> bool:
        """Whether this process has ended. Waits up to ``timeout_s`` for a connection attempt that shows it."""
        if self.link is not None and not self.link.lost:
            timeout_s = 0.0  # connected, either to that process, or to a later one and that process is known to be dead
        return await self.health.is_dead(instance, timeout_s)

    async def keep_connected(self, changed: Callable[[], None]) -> None:
        """Keep it connected until cancelled. ``changed`` is called whenever it becomes usable or unusable."""
        while True:
            tls_version = tls.version if (tls := self.role.tls) else 0
            async with rpc.channel(self.address, tls, self.role.name) as channel:
                stub = self.role.stub(channel)
                try:
                    info, load = await self._reach(stub, tls_version)
                except SpecdecError:
                    continue  # the certificates have changed, and a channel keeps its old ones
                link = self.role.connect(stub, info)
                self.info, self.link, self.problem = info, link, ""
                self.health.start_stream()
                self.num_kv_slots = load.kv_slots_total
                self._log(logging.INFO, "replica connected", instance=info.instance)
                changed()
                try:
                    await self._carry(channel, link, changed)
                finally:
                    self.link, self.load.latency_s = None, None
                    changed()
            if self._num_silent:
                await asyncio.sleep(min(0.02 * 2.0 ** min(self._num_silent, 9), _MAX_PAUSE_S))
            if self._ejected.is_set():
                self._ejection.start_probation()
                await asyncio.sleep(self._ejection.pause_s)
                self._ejection.end_pause()
                self._ejected.clear()

    async def _reach(self, stub: Any, tls_version: int) -> tuple[ModelInfo, Load]:
        """Connect and check the model; retries until it succeeds. Raises SpecdecError if the certificates change."""
        tls = self.role.tls
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(SpecdecError),
            stop=lambda _: tls is not None and tls.changed_since(tls_version),
            reraise=True,
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            before_sleep=self._note,
        )
        async for attempt in retrying:
            with attempt:
                try:
                    info, load = await _model_info(stub)
                except ReplicaLost as error:
                    # A broken connection does not show whether the process is alive; a refused one shows its end.
                    if await is_refused(self.address):
                        self.health.note_attempt(self._last_instance, alive=None)
                    elif (tls or not self.info) and (problem := await tls_problem(self.address, tls, self.role.name)):
                        raise _NoConnection(f"no connection: {problem}") from error
                    raise
                self.health.note_attempt(self._last_instance, alive=info.instance)
                await self._admit(stub, info)
        return info, load

    async def _admit(self, stub: Any, info: ModelInfo) -> None:
        """Check the model. If it does not fit, ask for all its tokens, once, so that the refusal can name some."""
        try:
            self.role.admit(self.address, info)
        except ModelMismatch:
            if self._tokens[0] != info.instance:
                self._tokens = info.instance, ()
                with contextlib.suppress(SpecdecError):  # a very large vocabulary is more than an answer may have
                    with_tokens, _ = await _model_info(stub, tokens=True)
                    self._tokens = info.instance, with_tokens.tokens
            self.role.admit(self.address, dataclasses.replace(info, tokens=self._tokens[1]))

    async def _carry(self, channel: grpc.aio.Channel, link: Link, changed: Callable[[], None]) -> None:
        started = time.monotonic()
        stream = asyncio.create_task(link.run())
        others = {
            asyncio.create_task(self._ejected.wait()),
            asyncio.create_task(self.health.watch(channel, self.instance, changed)),
        }
        try:
            pending: set[asyncio.Task[Any]] = {stream, *others}
            while True:
                # Wait even if it is ejected already: a stream that never began would not end its lanes.
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                # The health watch may end early: not every server has one.
                if stream.done() or self._ejected.is_set():
                    break
            if stream.done():
                # For a cancelled task exception() raises, and this replica would never be connected again.
                error = ReplicaLost("its task was cancelled") if stream.cancelled() else stream.exception()
                lived_s = time.monotonic() - started
                self._num_silent = 0 if link.spoke else self._num_silent + 1
                self.problem = str(error)
                self.losses[error.reason if isinstance(error, SpecdecError) else "REPLICA_LOST"] += 1
                if link.draining:
                    self.health.note_draining(self.instance)
                elif lived_s < _SHORT_STREAM_S or (isinstance(error, WatchdogFired) and error.stood_still):
                    self._ejection.start_probation()
                self._log(logging.WARNING, "replica lost", reason=str(error))
                if isinstance(error, HostileReplica):
                    self.eject(str(error))
        finally:
            for task in (stream, *others):
                task.cancel()
            await asyncio.gather(stream, *others, return_exceptions=True)
        self._ejection.end_stream(time.monotonic() - started)

    def _note(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, (ModelMismatch, _NoConnection)) and self.problem != str(error):
            self._log(logging.ERROR, "replica refused", reason=str(error))
        self.problem = str(error)

    @property
    def _last_instance(self) -> str | None:
        return self.info.instance if self.info is not None else None

    def _log(self, level: int, message: str, **extra: Any) -> None:
        log.log(level, message, extra={"role": self.role.name, "address": self.address, **extra})


async def _model_info(stub: Any, tokens: bool = False) -> tuple[ModelInfo, Load]:
    """The model of an endpoint and its load; ``tokens``: with all its tokens. Raises SpecdecError."""
    request = common_pb2.GetModelInfoRequest(tokens=tokens)
    try:
        response: common_pb2.GetModelInfoResponse = await stub.GetModelInfo(request, timeout=_INFO_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise rpc.error_of(error) from error
    return wire.read_info(response.model), wire.read_load(response.load)

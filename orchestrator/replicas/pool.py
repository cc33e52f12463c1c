"""The replicas of one role: found by DNS name, picked by prompt, load and latency, ejected if they are slow.

Knows endpoints; does not know connections (orchestrator.replicas.replica) and sequences.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from orchestrator.replicas.choice import Choice
from orchestrator.replicas.replay_gate import ReplayGate
from orchestrator.replicas.replica import Replica, Role
from specdec.core.errors import NoReplica
from specdec.core.rounds import ModelInfo

log = logging.getLogger(__name__)

_COMPARE_EVERY_S = 1.0
_AGAIN_AFTER_S = 1.0
_SLOW_FACTOR, _SLOW_MARGIN_S = 3.0, 0.03
"""A replica is slow if its latency exceeds the fastest one's by this factor and by this margin."""

_FAR_FACTOR, _FAR_MARGIN_S = 2.0, 0.005
"""The same for one that is too slow, or too far away, to be picked for what it may have in its cache."""

_LOAD_RATIO = 2
"""A replica is compared only with those that had at least its number of sequences divided by this."""


class Pool:
    """``async with`` finds all endpoints of ``addresses`` (host:port) and keeps them connected. ``changed`` is called
    whenever an endpoint becomes usable or unusable. ``by_prefix``: prompts that begin alike share replicas."""

    def __init__(
        self,
        role: Role,
        addresses: Sequence[str],
        resolve_every_s: float = 5.0,
        by_prefix: bool = True,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.replicas: list[Replica] = []
        self.unresolved: dict[str, str] = {}  # address -> why
        self.waiting_for_room: set[object] = set()
        """Clients of sequences that a full replica refused, and that retry."""
        self.replays = ReplayGate(lambda: sum(replica.ready for replica in self.replicas))
        self.role = role
        self._addresses = addresses
        self._choice = Choice() if by_prefix else None
        self._resolve_every_s = resolve_every_s
        self._endpoints: dict[str, set[str]] = {}  # of each address, as last resolved
        self._changed = asyncio.Event()
        self._on_change = changed
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._upkeep: list[asyncio.Task[None]] = []
        self._random = random.Random()

    async def __aenter__(self) -> Pool:
        await self._resolve()
        self._upkeep = [
            asyncio.create_task(_keep(self._keep_resolving, f"name resolution of {self.role.name}s")),
            asyncio.create_task(_keep(self._keep_comparing, f"comparison of {self.role.name}s")),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._upkeep, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def info(self) -> ModelInfo | None:
        """The model of the replicas that are ready now; None: none is."""
        return next((replica.info for replica in self.replicas if replica.ready), None)

    @property
    def info_in_use(self) -> ModelInfo | None:
        """The model of the replicas in use, also while none of them takes new sequences."""
        return next((replica.info for replica in self.replicas if replica.in_use), None)

    def pick(
        self,
        avoid: Replica | None = None,
        needs: frozenset[str] = frozenset(),
        num_tokens: int = 0,
        prefixes: Sequence[bytes] = (),
    ) -> Replica | None:
        """The first ready replica with room of those that ``prefixes`` name (orchestrator.replicas.choice). Without
        them nothing is shared, and one that is far away is worth no cache: the better of two drawn at random, so that
        all are used and none is overrun.

        ``avoid`` is picked only if there is no other; a replica without the capabilities ``needs`` never. One with a KV
        cache too small for ``num_tokens`` is picked only if no replica with a larger one is known, ready or not.
        """
        able = [replica for replica in self.replicas if replica.can(needs)]
        ready = [replica for replica in able if replica.ready and replica.fits(num_tokens)]
        if not ready and not any(replica.num_kv_slots > num_tokens for replica in able):
            ready = [replica for replica in able if replica.ready]
        ready = [replica for replica in ready if replica.trusted] or ready
        ready = [replica for replica in ready if replica is not avoid] or ready
        if ready and prefixes and self._choice is not None:
            named = self._choice.first_with_room(prefixes, ready)
            if not self._exceeds(named, _FAR_FACTOR, _FAR_MARGIN_S):
                return named
        if len(ready) > 2:
            ready = self._random.sample(ready, 2)
        self._random.shuffle(ready)
        return min(ready, key=lambda replica: replica.score, default=None)

    def count_open(self, replica: Replica, prefixes: Sequence[bytes]) -> None:
        """A sequence is opened at ``replica``."""
        if prefixes and self._choice is not None:
            is_first = self._choice.order(prefixes, [other for other in self.replicas if other.ready])[:1] == [replica]
            replica.prefixes.hits += is_first
            replica.prefixes.spills += not is_first
            self._choice.remember(prefixes, replica)

    async def wait_for_one(
        self,
        timeout_s: float,
        avoid: Replica | None = None,
        needs: frozenset[str] = frozenset(),
        num_tokens: int = 0,
        prefixes: Sequence[bytes] = (),
    ) -> Replica:
        """Like ``pick``, but waits. After ``timeout_s`` raises NoReplica, with the problem of each replica."""
        try:
            async with asyncio.timeout(timeout_s):
                while (replica := self.pick(avoid, needs, num_tokens, prefixes=prefixes)) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return replica
        except TimeoutError:
            message = f"no {self.role.name} could be reached in {timeout_s:g} s"
            raise NoReplica(message, self.problems() or "none is named") from None

    def problems(self) -> str:
        """Why each replica is of no use to a request that finds none."""
        lacks = "knows less than this request needs, or has no KV cache for it"
        problems = [f"{replica.address}: {replica.why_not or lacks}" for replica in self.replicas]
        return "; ".join(problems + [f"{address}: {why}" for address, why in self.unresolved.items()])

    async def until(self, ready: bool) -> None:
        """Wait until any replica is ready, or with False until none is."""
        while any(replica.ready for replica in self.replicas) != ready:
            self._changed.clear()
            await self._changed.wait()

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(self._resolve_every_s)
            await self._resolve()

    async def _resolve(self) -> None:
        """Find new endpoints; forget those that are gone from their name and are not connected."""
        for address in self._addresses:
            host, _, port = address.rpartition(":")
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(
                    host.strip("[]"), int(port), type=socket.SOCK_STREAM
                )
            except (OSError, UnicodeError) as error:  # a part of a name may be too long
                # Working replicas must survive a failure of the name service.
                self.unresolved[address] = f"the name cannot be resolved: {error}"
                continue
            self.unresolved.pop(address, None)
            families = {family for family, *_ in infos}
            # localhost has an IPv4 and an IPv6 address, and a service listens on one of them.
            family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
            self._endpoints[address] = {_joined(where) for fam, _, _, _, where in infos if fam == family}
        wanted = {endpoint: None for endpoints in self._endpoints.values() for endpoint in sorted(endpoints)}
        known = {replica.address for replica in self.replicas}
        for endpoint in wanted:  # in the order in which they are named
            if endpoint not in known:
                self._add(Replica(endpoint, self.role))
        for replica in [replica for replica in self.replicas if replica.address not in wanted and not replica.link]:
            self.replicas.remove(replica)
            self._tasks.pop(replica).cancel()

    def _add(self, replica: Replica) -> None:
        self.replicas.append(replica)
        connect = partial(replica.keep_connected, self._wake)
        self._tasks[replica] = asyncio.create_task(_keep(connect, f"the connection to {replica.address}"))

    def _wake(self) -> None:
        self._changed.set()
        self.replays.changed()
        self._on_change()

    async def _keep_comparing(self) -> None:
        """Eject replicas that are much slower than the fastest one in two comparisons in a row."""
        slow: dict[Replica, str] = {}
        known: dict[Replica, int] = {}
        while True:
            await asyncio.sleep(_COMPARE_EVERY_S)
            before, slow = slow, self._slow(known)
            known = {replica: replica.load.num_observed for replica in self.replicas}
            for replica, why in slow.items():
                if replica in before:  # a single slow comparison may come from other work on that machine
                    replica.eject(why)

    def _slow(self, known: Mapping[Replica, int]) -> dict[Replica, str]:
        """The slow replicas, with the reason, of those with more answers than in ``known``."""
        slow = {}
        for replica in self.replicas:
            if not replica.ready or replica.load.num_observed == known.get(replica, 0):
                continue
            if times := self._exceeds(replica, _SLOW_FACTOR, _SLOW_MARGIN_S):
                slow[replica] = f"{times[0] * 1e3:.0f} ms a round, another takes {times[1] * 1e3:.0f}"
        return slow

    def _exceeds(self, replica: Replica, factor: float, margin_s: float) -> tuple[float, float] | None:
        """The latencies of a ready replica and of the fastest one, if the first exceeds the second by a factor and a
        margin."""
        if (latency_s := replica.load.latency_s) is None:
            return None
        # A replica with few sequences has short rounds, and is no measure for a busy one.
        busy = replica.load.usual_sequences / _LOAD_RATIO
        timed = (other.load for other in self.replicas if other.ready and other.load.usual_sequences >= busy)
        fastest_s = min(load.latency_s for load in timed if load.latency_s is not None)
        return (latency_s, fastest_s) if latency_s > max(factor * fastest_s, fastest_s + margin_s) else None


def _joined(where: tuple[object, ...]) -> str:
    host, port = where[0], where[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


async def _keep(work: Callable[[], Awaitable[None]], what: str) -> None:
    """Do ``work``, which never ends by itself, again whenever it ends, until this task is cancelled."""
    while True:
        try:
            await work()
            log.error("a task has ended; it is started again", extra={"task": what})
        except Exception:
            log.exception("a task has failed; it is started again", extra={"task": what})
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            log.error("a task was cancelled from within; it is started again", extra={"task": what})
        await asyncio.sleep(_AGAIN_AFTER_S)

"""Diagnoses a deployment: asks every service, compares the answers, and explains the problems.

It changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.core.environment import PROXY, WEB_PROXIES
from specdec.core.rounds import Load, ModelInfo
from specdec.runner.vocabulary import Vocabulary, mismatch
from specdec.security.tls import Tls
from specdec.security.tls_diagnosis import tls_problem
from specdec.transport import rpc, wire
from specdec.v1 import common_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc, target_pb2_grpc

_NUM_CALLS = 7
_NO_CONNECTION = "TLS: "
_PREFIX = 12  # number of digest characters shown


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or a note. ``wrong``: the deployment does not work as intended until ``remedy`` is done."""

    wrong: bool
    what: str
    remedy: str


@dataclass(slots=True)
class Visit:
    """The answers of one service, or ``silence``, the reason why there are none."""

    role: str
    address: str
    silence: str = ""
    serving: bool = True
    round_trip_ms: float = 0.0  # median
    info: ModelInfo | None = None  # None for an orchestrator
    load: Load = field(default_factory=Load)
    keepalive: common_pb2.Keepalive = field(default_factory=common_pb2.Keepalive)
    replicas: Sequence[generation_pb2.Replica] = ()  # those that an orchestrator uses
    proxy: str = ""  # the variable with the proxy of this command's calls
    barrier: str = ""  # the variable with a proxy through which gRPC's own clients cannot reach an orchestrator

    def __str__(self) -> str:
        return f"{self.role} {self.address}"


async def visit(role: str, address: str, tls: Tls | None = None, api_key: str = "", timeout_s: float = 2.0) -> Visit:
    """Ask a service for all it reports. Never raises for a service that does not answer: that is a finding, too."""
    result = Visit(role, address, proxy=PROXY if os.environ.get(PROXY) else "")
    async with rpc.channel(address, tls, role) as channel:
        ask = _question(role, channel, api_key)
        try:
            answer = await ask(timeout_s)
            times = [await _timed(ask, timeout_s) for _ in range(_NUM_CALLS)]
            result.serving = await _serving(channel, timeout_s)
        except grpc.aio.AioRpcError as error:
            problem = await tls_problem(address, tls, role) if error.code() is grpc.StatusCode.UNAVAILABLE else ""
            result.silence = f"{_NO_CONNECTION}{problem}" if problem else _silence(role, error)
            return result
    result.round_trip_ms = statistics.median(times) * 1e3
    result.keepalive = answer.keepalive
    if role == "orchestrator":
        result.load = Load(answer.live_sequences, answer.waiting_requests)
        result.replicas = answer.replicas
        result.barrier = await _barrier(address, tls, timeout_s)
    else:
        result.info, result.load = wire.read_info(answer.model), wire.read_load(answer.load)
    return result


async def _barrier(address: str, tls: Tls | None, timeout_s: float) -> str:
    variable = next((name for name in WEB_PROXIES if os.environ.get(name)), "")
    if not variable or os.environ.get(PROXY):
        return ""
    async with rpc.channel(address, tls, "orchestrator", web_proxies=True) as channel:
        try:
            await _serving(channel, timeout_s)
        except grpc.aio.AioRpcError:
            return variable
    return ""


def _question(
    role: str, channel: grpc.aio.Channel, api_key: str = "", tokens: bool = False
) -> Callable[[float], Awaitable[Any]]:
    if role == "orchestrator":
        server = generation_pb2_grpc.GenerationServiceStub(channel)
        shown = rpc.bearer(api_key)
        return lambda timeout_s: server.GetServerInfo(
            generation_pb2.GetServerInfoRequest(), timeout=timeout_s, metadata=shown
        )
    make = target_pb2_grpc.TargetServiceStub if role == "target" else draft_pb2_grpc.DraftServiceStub
    model = make(channel)
    return lambda timeout_s: model.GetModelInfo(common_pb2.GetModelInfoRequest(tokens=tokens), timeout=timeout_s)


async def _ask_tokens(model: Visit, tls: Tls | None, timeout_s: float = 10.0) -> None:
    """Ask a model service for its tokens, to name some of them. Without an answer the report has none."""
    async with rpc.channel(model.address, tls, model.role, public=True) as channel:  # of any size
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await _question(model.role, channel, tokens=True)(timeout_s)
            model.info = wire.read_info(answer.model)


async def _timed(ask: Callable[[float], Awaitable[Any]], timeout_s: float) -> float:
    started = time.perf_counter()
    await ask(timeout_s)
    return time.perf_counter() - started


async def _serving(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    response: Any = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _silence(role: str, error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return f"something answers there, but it is no {role}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it does not answer in time"
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return f"it cannot be reached ({error.details()})"
    return f"it answers {error.code().name}: {error.details()}"


async def examine(
    orchestrator: str,
    targets: Sequence[str] = (),
    drafts: Sequence[str] = (),
    *,
    tls: Tls | None = None,
    api_key: str = "",
) -> tuple[list[Visit], list[Finding]]:
    """Visit these services and the replicas of the orchestrator, and compare them."""
    first = await visit("orchestrator", orchestrator, tls=tls, api_key=api_key)
    services = {("target", address) for address in targets} | {("draft", address) for address in drafts}
    services |= {(replica.role, replica.address) for replica in first.replicas if replica.address}
    visits = [
        first,
        *await asyncio.gather(*(visit(role, address, tls) for role, address in sorted(services, reverse=True))),
    ]
    models = [service for service in visits if service.info]
    if len({(model.info.vocab_size, model.info.tokenizer_fingerprint) for model in models if model.info}) > 1:
        await asyncio.gather(*(_ask_tokens(model, tls) for model in models))
    return visits, list(findings(visits))


def findings(visits: Sequence[Visit]) -> Iterator[Finding]:
    """All problems and notes about these services."""
    for service in visits:
        yield from _alone(service)
    models = [service for service in visits if service.info]
    targets = [model for model in models if model.role == "target"]
    drafts = [model for model in models if model.role == "draft"]
    replicas = [replica for service in visits for replica in service.replicas]
    roles = {service.role for service in visits} | {replica.role for replica in replicas}
    if "target" not in roles:
        yield Finding(True, "no target is known", "name the targets to the orchestrator (--target), or here")
    if "draft" not in roles:
        yield Finding(False, "there is no draft: the target works alone", "name one to speed it up (--draft)")
    if not all(replica.address for replica in replicas):
        yield Finding(False, "this API key does not show where the replicas are", "use an operator's key")
    yield from _one_model(targets)
    for draft, target in itertools.product(drafts, targets):
        yield from _pair(draft, target)
    for client, server in itertools.product([None, *visits], visits):
        if client is None and server.role == "orchestrator":
            yield from _pings("this command", rpc.keepalive(), server)
        elif client is not None and client.replicas and server.role != "orchestrator":
            yield from _pings(str(client), client.keepalive, server)


def _alone(service: Visit) -> Iterator[Finding]:
    if service.silence:
        remedy = "start it, or correct the address; look at firewalls between here and there"
        if service.silence.startswith(_NO_CONNECTION):
            remedy = (
                "give both sides certificates of one CA, each with its own name, and the files to this command, too"
            )
        elif service.silence.startswith("it answers UNAUTHENTICATED"):
            remedy = "set SPECDEC_API_KEY"
        elif service.proxy:
            proxy = service.proxy
            remedy = f"unset {proxy} or name the host in no_{proxy}, unless its proxy leads there; or {remedy}"
        yield Finding(True, f"{service}: {service.silence}", remedy)
    elif not service.serving:
        yield Finding(
            True,
            f"{service} reports that it is not serving",
            "wait if it is starting or draining, or still has no target; see its log",
        )
    if service.barrier:
        what = f"{service} cannot be reached through the proxy in {service.barrier}, which other gRPC clients use"
        yield Finding(False, what, "add its host to no_proxy (in lower case) in the environment of such clients")
    for replica in service.replicas:
        if not replica.ready:
            where, why = f"{replica.role} {replica.address}", f": {replica.problem}"
            if not replica.address:  # which this key does not show
                where, why = f"a {replica.role}", ""
            what = f"{service} does not use {where}{why}"
            yield Finding(True, what, "see the finding about that replica; the orchestrator retries automatically")


def _one_model(targets: Sequence[Visit]) -> Iterator[Finding]:
    by_digest: dict[str, list[Visit]] = {}
    for target in targets:
        by_digest.setdefault(target.info.model_digest if target.info else "", []).append(target)
    if len(by_digest) > 1:
        groups = [
            f"{digest[:_PREFIX]} ({members[0].info.name}, {members[0].info.dtype}) at "
            + ", ".join(member.address for member in members)
            for digest, members in by_digest.items()
            if members[0].info
        ]
        what = f"the targets serve different models: {'; '.join(groups)}"
        yield Finding(True, what, "serve one checkpoint, dtype and version everywhere: only one of these is used")


def _pair(draft: Visit, target: Visit) -> Iterator[Finding]:
    if draft.info is None or target.info is None:
        return
    mine, theirs = draft.info, target.info
    if problem := mismatch(mine, theirs, Vocabulary(theirs.tokens) if theirs.tokens else None):
        what = f"{draft} cannot draw for {target}: it {problem}"
        yield Finding(True, what, "serve a draft made with the target's tokenizer; until then the target works alone")
    if mine.context_length < theirs.context_length:
        what = (
            f"{draft} has a context of {mine.context_length} tokens, {target} of {theirs.context_length}:"
            " beyond the shorter one the target works alone"
        )
        yield Finding(False, what, "take a draft with a longer context if your texts are that long")


def _pings(client: str, its: common_pb2.Keepalive, server: Visit) -> Iterator[Finding]:
    if server.silence:
        return
    theirs = server.keepalive
    if not theirs.min_ping_interval_ms or not its.keepalive_ms:
        what = f"{client} and {server}: one of them does not tell its keepalive settings"
        yield Finding(False, what, "it is older than this command; run one version everywhere")
    elif its.keepalive_ms < theirs.min_ping_interval_ms:
        what = (
            f"{client} pings idle connections every {its.keepalive_ms} ms, and {server} allows one ping in"
            f' {theirs.min_ping_interval_ms} ms: it will end the connection ("too many pings") with all calls on it'
        )
        yield Finding(True, what, "run the same version, or the same keepalive settings, everywhere")

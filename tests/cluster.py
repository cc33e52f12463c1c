"""The three services in this process, on free ports of loopback, over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from draft_service.drafter import Drafter
from draft_service.server import create_server as create_draft_server
from orchestrator.api.server import OrchestratorServer
from orchestrator.control.cost_model import CostModel
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client
from specdec.core.settings import EngineSettings
from specdec.server.model_server import ModelServer
from specdec.transport import rpc
from target_service.server import create_server as create_target_server
from target_service.verifier import Verifier
from testing.certificates import files, stranger
from testing.patience import eventually


@dataclass
class Cluster:
    """A running deployment and a client of it."""

    client: Client
    orchestrator: OrchestratorServer
    targets: list[ModelServer]
    drafts: list[ModelServer]

    async def settled(self, timeout_s: float = 30.0) -> None:
        """Returns once nothing of any sequence is left anywhere; fails after ``timeout_s``."""
        await eventually(
            lambda: (
                not (
                    self.orchestrator.live_sequences
                    or any(
                        server.load.live_sequences or server.load.kv_slots_used
                        for server in (*self.targets, *self.drafts)
                    )
                )
            ),
            timeout_s,
        )


@asynccontextmanager
async def cluster(
    verifiers: Sequence[Verifier],
    drafters: Sequence[Drafter] = (),
    certificates: Path | None = None,
    client: Mapping[str, Any] | None = None,
    patient: bool = True,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """``settings`` are the orchestrator's, ``client`` the client's. Returns when every replica is connected.

    With the directory of ``certificates`` (specdec.security.dev_ca) all of them use TLS.
    Requests that name no number draft 5 tokens a round: where passes take no time, drafting would never pay.
    ``patient``: a busy machine is no lost replica and no late draft; what a test counts does not depend on time.
    """
    settings.setdefault("num_draft_tokens", 5)
    async with AsyncExitStack() as stack:
        if patient:
            settings.setdefault("watchdog_s", 60.0)
            stack.enter_context(patch("orchestrator.drafting.draft_client._PATIENCE_S", 60.0))
            stack.enter_context(patch.object(CostModel, "deadline_s", lambda *_: 60.0))
        own = {role: files(certificates, role) if certificates else {} for role in ("target", "draft", "orchestrator")}
        targets = [create_target_server(verifier, EngineSettings(**own["target"])) for verifier in verifiers]
        drafts = [create_draft_server(drafter, EngineSettings(**own["draft"])) for drafter in drafters]
        for server in (*targets, *drafts):
            await server.start()
            stack.push_async_callback(server.stop)
        orchestrator = OrchestratorServer(
            OrchestratorSettings(
                target=[f"127.0.0.1:{server.port}" for server in targets],
                draft=[f"127.0.0.1:{server.port}" for server in drafts],
                **own["orchestrator"],
                **settings,
            )
        )
        await orchestrator.start()
        stack.push_async_callback(orchestrator.stop)
        tls = {"tls": stranger(certificates)} if certificates else {}
        made = Client(f"127.0.0.1:{orchestrator.port}", **tls, **(client or {}))
        await stack.enter_async_context(made)
        await connected(orchestrator)
        yield Cluster(made, orchestrator, targets, drafts)


async def connected(orchestrator: OrchestratorServer, timeout_s: float = 30.0) -> None:
    """Returns once every replica can be used."""
    await eventually(
        lambda: all(r.ready for r in (*orchestrator.targets.replicas, *orchestrator.drafts.replicas)), timeout_s
    )


async def live(orchestrator: OrchestratorServer, count: int, timeout_s: float = 30.0) -> None:
    """Returns once so many sequences are live."""
    await eventually(lambda: orchestrator.live_sequences == count, timeout_s)


async def orders_wait(server: ModelServer, count: int = 1, timeout_s: float = 30.0) -> None:
    """Returns once so many orders wait for the model's thread, which is in a pass."""
    await eventually(lambda: server.servicer.streams._loop._inbox.qsize() >= count, timeout_s)


def read_narrowly(patch: pytest.MonkeyPatch) -> None:
    """Channels made from now on take in little on behalf of a client that does not read."""
    narrow = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    patch.setattr(rpc, "CHANNEL_OPTIONS", [*rpc.CHANNEL_OPTIONS, *narrow])

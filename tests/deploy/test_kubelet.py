"""The demo's manifests with certificates and keys, run as pods that come, go, hang and are replaced under load.

The models are table models, so the answer to each request is known.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.cli.main import app
from specdec.client import Client
from specdec.core.errors import ReplicaLost, Unauthenticated
from specdec.security import dev_ca as certificates
from testing.certificates import caller, stranger
from testing.lab import load_of
from testing.table_model import Table
from tests.deploy.kubelet import OURS, Node, Pod, status_of
from tests.deploy.load import Load
from tests.deploy.manifests import ROLES, needs_kubectl, rendered

pytestmark = [pytest.mark.slow, needs_kubectl, pytest.mark.asyncio(loop_scope="module")]

ORCHESTRATOR = ("specdec", "serve", "orchestrator")
TABLES = {
    ("specdec", "serve", role): (sys.executable, "-m", "testing.table_service", role, f"--pass-ms={pass_ms}")
    for role, pass_ms in (("target", 20), ("draft", 1))
} | {ORCHESTRATOR: (*OURS[ORCHESTRATOR], "--tokenizer=")}  # a table model has another vocabulary
TABLE = Table()
GOOD = (0, 0)


@dataclass
class Cluster:
    """The pods, and a client's credentials for them."""

    node: Node
    certificates: Path
    token: str

    def client(self, tls: bool = True, token: str | None = None) -> Client:
        known = stranger(self.certificates) if tls else None
        return Client(self.node.service.address, tls=known, api_key=self.token if token is None else token)

    def load(self) -> Load:
        return Load(lambda: self.client(), 3, lambda answer: answer.same(TABLE))

    async def gets_work(self, pod: Pod) -> None:
        operator = caller(self.certificates, "operator")
        async with asyncio.timeout(60.0):
            while not (await load_of(f"{pod.address}:{pod.port}", "target", operator)).passes:
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One pod of each. The secrets are made as docs/kubernetes.md says."""
    directory = tmp_path_factory.mktemp("pki")
    certificates.make(directory)
    made = CliRunner().invoke(app, ["key", "alice"])
    keys = directory / "keys"
    keys.mkdir()
    (keys / "api-keys").write_text(made.stdout)
    secrets = {f"specdec-tls-{role}": directory / role for role in ROLES} | {"specdec-api-keys": keys}
    async with Node(rendered("cpu-demo", ("tls", "api-keys")), TABLES, secrets, hurry=4.0) as node:
        # The orchestrator first, and beside it what it needs: none is restarted for that.
        await asyncio.gather(*(node.scale(name) for name in ("orchestrator", "draft", "target")))
        yield Cluster(node, directory, made.stderr.strip())
        assert not any(pod.num_restarts for pod in itertools.chain(*node.pods.values()))


async def test_no_request_fails_while_pods_come_go_hang_and_are_replaced(cluster: Cluster) -> None:
    """Every pod is replaced, all services at once, as after kubectl apply with a new tag."""
    node = cluster.node
    first = list(itertools.chain(*node.pods.values()))
    async with cluster.load() as load:
        replaced = asyncio.gather(node.rollout("orchestrator"), node.rollout("draft"))
        await node.scale("target", 3)
        await asyncio.gather(*(cluster.gets_work(pod) for pod in node.pods["target"]))
        surplus = node.pods["target"][2:]
        await node.scale("target", 2)
        stubborn = node.pods["target"].pop()
        node.ended.append(stubborn)
        stubborn.signal(signal.SIGSTOP)
        await asyncio.gather(stubborn.terminate(grace_s=1.5), node.rollout("target"), replaced)
    assert not load.failures, load.failures
    assert status_of([*surplus, *first]) == [GOOD] * 4
    assert status_of([stubborn]) == [(-signal.SIGKILL, 0)], "it is killed after its grace period"
    assert not set(first) & set(itertools.chain(*node.pods.values()))
    draft_tokens = sum(answer.sample.finish.speculation.num_draft_tokens for answer in load.answers)
    assert draft_tokens > 0, "the pods of the draft were found, too"


async def test_a_client_without_token_or_without_tls_is_refused(cluster: Cluster) -> None:
    async with cluster.client(token="") as client:
        with pytest.raises(Unauthenticated):
            await client.server_info()
    async with cluster.client(tls=False) as client:
        with pytest.raises(ReplicaLost):
            await client.server_info()

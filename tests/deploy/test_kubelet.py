"""The manifests of the demo with certificates and keys, run: pods of all services at once, each replaced under load,
more and fewer targets, and pods that will not go. With table models, so that what each request must give is known.

The pods are shared: a test finds one of each, or a target more, and leaves as many.
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

from bench.chaos.lab import load_of, until
from bench.models.table_model import Table
from specdec.cli.main import app
from specdec.client import Client
from specdec.core.errors import ReplicaLost, Unauthenticated
from specdec.security import dev_ca as certificates
from tests.certificates import caller, stranger
from tests.deploy.kubelet import OURS, Node, Pod, status_of
from tests.deploy.load import Load
from tests.deploy.manifests import ROLES, needs_kubectl, rendered

pytestmark = [pytest.mark.slow, needs_kubectl, pytest.mark.asyncio(loop_scope="module")]

ORCHESTRATOR = ("specdec", "serve", "orchestrator")
TABLES = {
    ("specdec", "serve", role): (sys.executable, "-m", "bench.models.table_service", role, f"--pass-ms={pass_ms}")
    for role, pass_ms in (("target", 20), ("draft", 1))
} | {ORCHESTRATOR: (*OURS[ORCHESTRATOR], "--tokenizer=")}  # a table has another vocabulary than the demo's models
TABLE = Table()
GOOD = (0, 0)
_PATIENCE_S = 60.0


@dataclass
class Cluster:
    """The pods, and what a client of them has."""

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

        async def works() -> bool:
            return (await load_of(f"{pod.address}:{pod.port}", "target", operator)).passes > 0

        assert await until(works, _PATIENCE_S) < _PATIENCE_S, "no pass"


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
    async with Node(rendered("cpu-demo", ("tls", "api-keys")), TABLES, secrets, hurry=5.0) as node:
        # The orchestrator first, and beside it what it needs: nobody is started again for that.
        await asyncio.gather(*(node.scale(name) for name in ("orchestrator", "draft", "target")))
        yield Cluster(node, directory, made.stderr.strip())
        assert not any(pod.num_restarts for pod in itertools.chain(*node.pods.values()))


async def test_more_targets_get_work_and_fewer_are_missed_by_no_request(cluster: Cluster) -> None:
    node = cluster.node
    async with cluster.load() as load:
        await node.scale("target", 3)
        await asyncio.gather(*(cluster.gets_work(pod) for pod in node.pods["target"]))
        leaving = node.pods["target"][2:]
        await node.scale("target", 2)
    assert not load.failures, load.failures
    assert status_of(leaving) == [GOOD]


async def test_a_pod_that_does_not_go_is_killed_after_its_grace_and_its_requests_go_on(cluster: Cluster) -> None:
    node = cluster.node
    await node.scale("target", 2)
    async with cluster.load() as load:
        stubborn = node.pods["target"].pop()
        node.ended.append(stubborn)
        await cluster.gets_work(stubborn)
        stubborn.signal(signal.SIGSTOP)
        await stubborn.terminate(grace_s=3.0)
    assert not load.failures, load.failures
    assert status_of([stubborn]) == [(-signal.SIGKILL, 0)]


async def test_no_request_fails_while_every_pod_is_replaced(cluster: Cluster) -> None:
    node = cluster.node
    leaving = list(itertools.chain(*node.pods.values()))
    async with cluster.load() as load:
        # All at the same time, as after kubectl apply with a new tag.
        await asyncio.gather(*(node.rollout(name) for name in node.pods))
    assert not load.failures, load.failures
    assert status_of(leaving) == [GOOD] * len(leaving)
    assert not set(leaving) & set(itertools.chain(*node.pods.values()))
    draft_tokens = sum(answer.sample.finish.speculation.num_draft_tokens for answer in load.answers)
    assert draft_tokens > 0, "the pods of the draft were found, too"


async def test_who_has_no_token_or_speaks_in_the_clear_is_refused(cluster: Cluster) -> None:
    async with cluster.client(token="") as client:
        with pytest.raises(Unauthenticated):
            await client.server_info()
    async with cluster.client(tls=False) as client:
        with pytest.raises(ReplicaLost):
            await client.server_info()

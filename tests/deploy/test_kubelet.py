"""The manifests of the demo, run: pods in any order, each service replaced under load, more and fewer targets, and
pods that will not go. With table models, so that what each request must give is known."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys

from bench.chaos.lab import load_of
from bench.table_model import Table
from specdec.client import Client
from tests.deploy.kubelet import OURS, Node, status_of
from tests.deploy.load import Load
from tests.deploy.manifests import needs_kubectl, rendered

ORCHESTRATOR = ("specdec", "serve", "orchestrator")
TABLES = {
    ("specdec", "serve", role): (sys.executable, "-m", "bench.table_service", role, f"--pass-ms={pass_ms}")
    for role, pass_ms in (("target", 8), ("draft", 1))
} | {ORCHESTRATOR: (*OURS[ORCHESTRATOR], "--tokenizer=")}  # a table has another vocabulary than the demo's models
GOOD = (0, 0)


@needs_kubectl
async def test_no_request_fails_while_pods_come_and_go() -> None:
    table = Table()
    async with Node(rendered("cpu-demo"), TABLES) as node:
        # The orchestrator first, and what it needs later: nobody is started again for that.
        await node.scale("orchestrator")
        await asyncio.gather(node.scale("draft"), node.scale("target"))
        load = Load(node.service.address, 5, lambda answer: answer.same(table))
        async with load, Client(node.service.address) as client:
            await node.scale("target", 3)
            info = await client.server_info()
            assert [each.ready for each in info.replicas if each.role == "target"] == [True] * 3
            await asyncio.gather(*(_gets_work(f"{pod.address}:{pod.port}") for pod in node.pods["target"]))
            await node.scale("target", 1)
            await asyncio.gather(node.rollout("draft"), node.rollout("target"))
            await node.rollout("orchestrator")
        assert not load.failures, load.failures
        assert len(load.answers) > 50
        assert status_of(node.ended) == [GOOD] * 5  # two targets too many, one of each replaced
        assert status_of(list(itertools.chain(*node.pods.values()))) == [(None, 0)] * 3
        draft_tokens = sum(answer.sample.finish.speculation.num_draft_tokens for answer in load.answers)
        assert draft_tokens > 0, "the pods of the draft were found, too"


async def _gets_work(address: str) -> None:
    async with asyncio.timeout(30.0):
        while not (await load_of(address, "target")).passes:
            await asyncio.sleep(0.1)


@needs_kubectl
async def test_a_pod_that_does_not_go_is_killed_after_its_grace_and_its_requests_go_on() -> None:
    table = Table()
    async with Node(rendered("cpu-demo"), TABLES) as node:
        await asyncio.gather(node.scale("target", 2), node.scale("draft"), node.scale("orchestrator"))
        async with Load(node.service.address, 5, lambda answer: answer.same(table)) as load:
            stubborn = node.pods["target"].pop()
            node.ended.append(stubborn)
            await _gets_work(f"{stubborn.address}:{stubborn.port}")
            stubborn.signal(signal.SIGSTOP)
            await stubborn.terminate(grace_s=3.0)
        assert not load.failures, load.failures
        assert status_of([stubborn]) == [(-signal.SIGKILL, 0)]

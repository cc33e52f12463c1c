"""``python -m tests.deploy.drill``: the demo's manifests with the bundled pair, for minutes. Needs kubectl.

Under load it rolls every service out several times, scales targets 1 -> 3 -> 1, freezes a pod until its liveness probe
fails, and ends one that does not react. Every text is compared with that of the same request before.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable

from specdec.client import Client
from testing.patience import eventually
from testing.traffic import Answer, Asked, ask, percentile
from tests.deploy.kubelet import Node, Pod, status_of
from tests.deploy.load import Load
from tests.deploy.manifests import rendered


class Texts:
    """The first answer to each request, generated before anything happens."""

    def __init__(self) -> None:
        self._known: dict[Asked, list[int]] = {}

    async def learn(self, client: Client, asked: list[Asked]) -> None:
        for each in asked:
            answer = await ask(client, each)
            assert answer.error is None, answer.error
            self._known[each] = answer.sample.token_ids

    def right(self, answer: Answer) -> bool:
        return answer.sample.token_ids == self._known[answer.asked]


async def drill(clients: int, rollouts: int) -> int:
    """The number of failed requests."""
    async with Node(rendered("cpu-demo")) as node:
        started = time.monotonic()
        await node.scale("orchestrator")
        await asyncio.gather(node.scale("draft"), node.scale("target"))
        num_restarts = sum(pod.num_restarts for pod in itertools.chain(*node.pods.values()))
        print(f"all available after {time.monotonic() - started:.0f} s, restarts: {num_restarts}", flush=True)
        texts = Texts()
        asked = [
            Asked(tuple(range(40 + 7 * index, 52 + 7 * index)), length, index, temperature, 120.0)
            for index, (length, temperature) in enumerate(itertools.product((16, 48, 120), (0.0, 0.8)))
        ]
        async with Client(node.service.address) as client:
            await texts.learn(client, asked)
        load = Load(lambda: Client(node.service.address), clients, texts.right, asked)

        async def step(what: str, work: Awaitable[object]) -> None:
            before, since = len(load.answers), time.monotonic()
            await work
            took = [answer.ended - answer.started for answer in load.answers[before:]]
            print(f"{what}: {time.monotonic() - since:.0f} s, {len(took)} requests,", end=" ")
            print(f"{len(load.failures)} failed so far, p50 {percentile(took, 0.5):.2f} s,", end=" ")
            print(f"slowest {max(took, default=0):.2f} s", flush=True)

        async with load:
            await step("nothing happens", asyncio.sleep(10))
            await step("targets 1 -> 3", node.scale("target", 3))
            await step("targets 3 -> 1", node.scale("target", 1))
            for _ in range(rollouts):
                for name in ("draft", "target", "orchestrator"):
                    await step(f"rollout of {name}", node.rollout(name))
            await step("targets 1 -> 2", node.scale("target", 2))
            frozen = node.pods["target"][0]
            frozen.signal(signal.SIGSTOP)
            await step("a target frozen until it is started again", _restarted(frozen))
            await step("until it serves again", node.scale("target", 2))
            stubborn = node.pods["target"].pop()
            node.ended.append(stubborn)
            stubborn.signal(signal.SIGSTOP)
            await step("a target that does not go, 40 s of grace", stubborn.terminate())
        print(f"pods that ended (status, restarts): {status_of(node.ended)}")
        print(f"{len(load.answers)} requests, {len(load.failures)} failed {load.failures[:5]}")
        return len(load.failures)


async def _restarted(pod: Pod) -> None:
    await eventually(lambda: pod.num_restarts, 180.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=2, help="of each service")
    arguments = parser.parse_args()
    raise SystemExit(bool(asyncio.run(drill(arguments.clients, arguments.rollouts))))


if __name__ == "__main__":
    main()

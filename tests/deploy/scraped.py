"""``python -m tests.deploy.scraped``: Prometheus with the profile's own configuration, beside the bundled pair.

Two targets and two drafts are found by name, as in compose. Under load a target is lost and a draft drained. Then every
scrape is up, every rule evaluates and every query of the dashboard has a result. Takes minutes, root and prometheus.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import shutil
import signal
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from contextlib import AsyncExitStack
from typing import Any

from specdec.cli.processes import free_ports
from specdec.client import Client
from specdec.core.errors import SpecdecError
from testing.dns import Names
from testing.lab import Lab, Process
from tests.checkout import ROOT
from tests.deploy.test_observability import targets

FOLDER = ROOT / "deploy" / "observability" / "prometheus"
DRAW = ROOT / "deploy" / "observability" / "grafana" / "draw_dashboard.py"
METRICS_PORT = 9464
PROMPTS = ("def main(", "import os\n\n", "class Node:\n    def __init__(self", "for i in range(")


class Prometheus:
    """``async with`` runs it with the configuration as it is; names are asked of ``names``."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._address = f"127.0.0.1:{free_ports(1)[0]}"
        self.url = f"http://{self._address}"
        self._data = tempfile.TemporaryDirectory(prefix="prometheus-")

    async def __aenter__(self) -> Prometheus:
        flags = (f"--config.file={FOLDER / 'prometheus.yml'}", f"--storage.tsdb.path={self._data.name}")
        flags += (f"--web.listen-address={self._address}", "--log.level=warn")
        self._process = await asyncio.create_subprocess_exec(*self._names.prefix, "prometheus", *flags)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.terminate()
        await self._process.wait()
        self._data.cleanup()

    async def ask(self, path: str, **fields: object) -> Any:
        """Raises OSError where it does not answer or refuses the question."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        return await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(url, timeout=30))["data"])


async def load(client: Client, number: int, stopping: asyncio.Event) -> None:
    """Half of the requests fix the number of draft tokens, some are greedy."""
    for count in itertools.count(number):
        if stopping.is_set():
            return
        fields: dict[str, Any] = {"num_draft_tokens": 4} if count % 2 else {}
        try:
            await client.generate(
                60.0, text=PROMPTS[count % 4], max_tokens=120, temperature=0.8 * (count % 3 > 0), seed=count, **fields
            )
        except SpecdecError as error:
            print(f"  a request failed: {error}")


async def wrong(prometheus: Prometheus, started: float) -> list[str]:
    """Problems with queries and rules, in words."""
    found = []
    now = time.time()
    for title, target in targets():
        query = target["expr"].replace("$__rate_interval", "20s").replace("$namespace", ".*")
        result = (await prometheus.ask("query_range", query=query, start=started, end=now, step=5))["result"]
        print(f"  {len(result)} series  {title}: {target['legendFormat']}")
        if not any(math.isfinite(float(value)) for series in result for _, value in series["values"]):
            found.append(f"nothing to show for {target['legendFormat']!r} in {title!r}")
    for group in (await prometheus.ask("rules"))["groups"]:
        for rule in group["rules"]:
            print(f"  {rule['health']}, {rule['state']}  {rule['name']}")
            if rule["health"] != "ok":
                found.append(f"rule {rule['name']}: {rule['health']} {rule.get('lastError', '')}")
    return found


async def watch(seconds: float, picture: str | None) -> int:
    """The number of problems. The dashboard is drawn into the file ``picture``."""
    names = await Names.create({})
    assert names is not None, "this needs root and mount namespaces"
    assert shutil.which("prometheus"), "this needs prometheus"
    async with names, AsyncExitStack() as stack:
        make = await stack.enter_async_context(Lab(1).processes())
        numbers = itertools.count(1)

        def serve(role: str, port: int, *flags: str) -> Process:
            address = f"127.88.0.{next(numbers)}"
            names.addresses.setdefault(role, []).append(address)
            flags = (f"--metrics-port={METRICS_PORT}", *flags)
            return make(f"specdec.cli.main serve {role}", *flags, prefix=names.prefix, host=address, port=port)

        def pair(role: str, port: int) -> list[Process]:
            return [serve(role, port, f"--model={ROOT}/models/demo/{role}", "--threads=1") for _ in range(2)]

        targets, drafts = pair("target", 50051), pair("draft", 50052)
        tokenizer = f"--tokenizer={ROOT}/models/demo/target"
        front = serve("orchestrator", 50050, "--target=target:50051", "--draft=draft:50052", tokenizer)
        for each in (*targets, *drafts, front):
            await each.start()
        for each in (*targets, *drafts, front):
            await each.healthy()
        prometheus = await stack.enter_async_context(Prometheus(names))
        client = await stack.enter_async_context(Client(front.address))
        stopping = asyncio.Event()
        started = time.time()
        clients = [asyncio.create_task(load(client, number, stopping)) for number in range(4)]
        await asyncio.sleep(seconds / 2)
        active = (await prometheus.ask("targets", state="active"))["activeTargets"]
        scrapes = sorted((each["labels"]["job"], each["labels"]["instance"], each["health"]) for each in active)
        print("\n".join(f"  {health}  {job} {instance}" for job, instance, health in scrapes))
        await targets[0].kill()
        drafts[0].signal(signal.SIGTERM)
        print("a target was lost, a draft drained")
        await asyncio.sleep(seconds / 2)
        found = await wrong(prometheus, started)
        if picture:
            minutes = f"--minutes={(time.time() - started) / 60}"
            drawing = [str(DRAW), prometheus.url, minutes, f"--output={picture}"]
            await (await asyncio.create_subprocess_exec(sys.executable, *drawing)).wait()
        if [health for _, _, health in scrapes] != ["up"] * 5:
            found.append(f"not five scrapes that are up: {scrapes}")
        stopping.set()
        await asyncio.gather(*clients)
        print("\n".join([f"{len(found)} wrong", *found]))
        return len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="of load")
    parser.add_argument("--draw", metavar="FILE", help="draw the dashboard at the end (PNG; needs matplotlib)")
    told = parser.parse_args()
    raise SystemExit(bool(asyncio.run(watch(told.seconds, told.draw))))


if __name__ == "__main__":
    main()

"""``make test-clients``: clients as people install them, each in a process and an environment of its own.

They ask ``specdec up`` with the demo pair, and for loops of tools a target that follows a script. A table of versions and
results is printed at the end, and the exit status is 1 if a check failed. Arguments are beginnings of clients' names: only these.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from specdec.cli.processes import free_ports
from tests.checkout import ROOT
from tests.clients import scene
from tests.clients.scene import Servers

ENVIRONMENTS = ROOT / ".venv-clients"
VLLM = ROOT / ".venv-vllm"


@dataclass(frozen=True)
class Client:
    """``module``: of this folder. ``environment``: its Python, or a directory of node modules."""

    name: str
    module: str
    environment: Path


CLIENTS = (
    Client("openai 1", "openai_sdk", ENVIRONMENTS / "openai-1"),
    Client("openai 3", "openai_sdk", ENVIRONMENTS / "openai-3"),
    Client("openai-node", "openai_node.mjs", ENVIRONMENTS / "node"),
    Client("Vercel ai", "vercel.mjs", ENVIRONMENTS / "node"),
    Client("litellm, of 2025", "litellm_sdk", ENVIRONMENTS / "openai-1"),
    Client("litellm", "litellm_sdk", ENVIRONMENTS / "openai-2"),
    Client("langchain-openai", "langchain_sdk", ENVIRONMENTS / "openai-3"),
    Client("openai-agents", "agents_sdk", ENVIRONMENTS / "openai-3"),
    Client("pydantic-ai", "pydantic_ai_sdk", ENVIRONMENTS / "openai-3"),
    Client("instructor", "instructor_sdk", ENVIRONMENTS / "openai-2"),
    Client("llama-index", "llama_index_sdk", ENVIRONMENTS / "openai-2"),
    Client("haystack", "haystack_sdk", ENVIRONMENTS / "openai-3"),
    Client("llm", "llm_cli", ENVIRONMENTS / "openai-3"),
    Client("lm-eval", "lm_eval_cli", ENVIRONMENTS / "openai-3"),
    Client("vllm bench serve", "vllm_bench", VLLM),
    Client("guidellm", "guidellm_bench", ENVIRONMENTS / "load"),
    Client("aiperf", "aiperf_bench", ENVIRONMENTS / "load"),
)


@dataclass
class Report:
    """What a client's checks gave, by their names: "ok", or "failed: ..." or "skipped: ...", with the reason."""

    client: str
    version: str = ""
    results: dict[str, str] = field(default_factory=dict)

    def names(self, result: str) -> list[str]:
        return [name for name, text in self.results.items() if text.partition(":")[0] == result]

    def row(self) -> str:
        texts = [f"{len(self.names('ok'))} ok" if self.names("ok") else ""]
        texts += [f"{result}: {', '.join(names)}" for result in ("failed", "skipped") if (names := self.names(result))]
        lines = textwrap.wrap("; ".join(filter(None, texts)), 80 - 30)
        return f"{self.client:<18}{self.version:<12}" + f"\n{'':30}".join(lines)


@contextlib.contextmanager
def running(*command: str) -> Iterator[None]:
    """A process in the background, which ends by SIGINT. Its output is shown if there is an error."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


@contextlib.contextmanager
def servers() -> Iterator[Servers]:
    grpc, http, scripted = free_ports(3)
    specdec = Path(sys.executable).parent / "specdec"
    with (
        running(str(specdec), "up", f"--port={grpc}", f"--http-port={http}"),
        running(sys.executable, "-m", "tests.clients.scripted", str(scripted)),
    ):
        urls = [f"http://127.0.0.1:{port}/v1" for port in (http, scripted)]
        for url in urls:
            await_server(url)
        yield Servers(*urls)


def await_server(url: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(f"{url}/models", timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def command_of(client: Client) -> list[str]:
    """Empty if it is not installed."""
    if not client.module.endswith(".mjs"):
        python = client.environment / "bin" / "python"
        return [str(python), "-m", f"tests.clients.{client.module}"] if python.exists() else []
    node = shutil.which("node")
    if node is None or not (client.environment / "node_modules").exists():
        return []
    for module in Path(__file__).parent.glob("*.mjs"):  # node looks for packages next to a program
        shutil.copy(module, client.environment)
    return [node, str(client.environment / client.module)]


def report(client: Client, at: Servers) -> Report:
    result = Report(client.name)
    command = command_of(client)
    if not command:
        result.results["all"] = f"skipped: {client.environment.name} is not installed"
        return result
    environment = {**os.environ, "SCENE": scene.as_json(at), "OPENAI_API_KEY": "any", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    lines = dict(line.split("\t", 1) for line in process.stdout.splitlines() if "\t" in line)
    result.version = lines.pop("version", "")
    result.results = lines
    if process.returncode or not lines:
        result.results["start"] = f"failed: {process.stderr[-1000:]}"
    return result


def main() -> None:
    chosen = [client for client in CLIENTS if not sys.argv[1:] or client.name.startswith(tuple(sys.argv[1:]))]
    reports = []
    with servers() as at:
        for client in chosen:
            reports.append(report(client, at))
            for name, result in reports[-1].results.items():
                print(f"{client.name}: {name}: {result}", flush=True)
    print("\n" + "\n".join(each.row() for each in reports))
    raise SystemExit(any(each.names("failed") for each in reports))


if __name__ == "__main__":
    main()
